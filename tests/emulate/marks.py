"""Which tests need a machine that can emulate links."""

import pytest

from isthmus.emulate.world import unable

LACKS = unable()
shaped = pytest.mark.skipif(LACKS is not None, reason=str(LACKS))
