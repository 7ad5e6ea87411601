"""Files in and out, strictly: YAML that people write, JSON that machines write.

Text becomes a `Document` of plain values, a document becomes typed objects; whatever is wrong is said with its file,
its line (YAML) or its path (JSON), and a remedy. Nothing is guessed, nothing is unpickled, nothing runs code.
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
