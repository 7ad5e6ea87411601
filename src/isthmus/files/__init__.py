"""Reads and writes files strictly: YAML that people write, JSON that machines write.

Text becomes a `Document` of plain values, and a document becomes typed objects. Every error names the file, the line
(YAML) or the path (JSON), and a remedy. Nothing is guessed, nothing is unpickled, and no code of a file is run.

The files in reading order:

- `document.py`: the `Document`: the plain values of a file, their lines, and their conversion to a type.
- `strict_yaml.py`: parses YAML into a document.
- `strict_json.py`: parses JSON into a document, and writes files that readers see whole or not at all.
- `fault_words.py`: turns msgspec's error messages into errors with found, expected and next step.
- `every_fault.py`: finds all faults of a file in one reading.
- `kinds.py`: recognises a file of the wrong kind, and says what takes it.
- `cache_folder.py`: the folder for results that can be computed again.

To add a kind of file, add it to `KINDS` in `kinds.py`; if it states its `kind`, list it in `_SAY_THEIR_KIND` in
`document.py` as well.
"""

from isthmus.files.cache_folder import cache_folder
from isthmus.files.document import NAME_RULE, Document, is_name, open_file
from isthmus.files.every_fault import build_or_every_fault
from isthmus.files.fault_words import ValuePath, close_name, show_path, show_value
from isthmus.files.kinds import expecting, wrong_kind
from isthmus.files.strict_json import encode_json, parse_json, plain_target, read_json, write_json, write_whole
from isthmus.files.strict_yaml import parse_yaml, read_yaml

__all__ = [
    "NAME_RULE",
    "Document",
    "ValuePath",
    "build_or_every_fault",
    "cache_folder",
    "close_name",
    "encode_json",
    "expecting",
    "is_name",
    "open_file",
    "parse_json",
    "parse_yaml",
    "plain_target",
    "read_json",
    "read_yaml",
    "show_path",
    "show_value",
    "write_json",
    "write_whole",
    "wrong_kind",
]
