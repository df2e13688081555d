"""YAML as a recipe may use it: no key twice, and no value that YAML 1.1 reads otherwise than it looks.

PyYAML follows YAML 1.1, where `yes` and `no` are booleans, `010` is 8, `1:30` is 90, `1e-3` is a string and the last of two equal keys wins.
Here scalars are read by the core schema of YAML 1.2 (section 10.3.2), in decimal, and a key that stands twice is an error.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

_MOST_VALUES = 100_000  # aliases expanded: a few lines of YAML can stand for billions


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, Any]]]] = {}  # type: ignore[misc]


_SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), ["" if char == "\0" else char for char in _first])


def _without_duplicates(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    given = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    keys = [loader.construct_object(key, deep=True) for key in given]
    for key, at in zip(keys, given, strict=True):
        if isinstance(key, (dict, list)):
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is not a valid key: give a name", at.start_mark)
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", at.start_mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _without_duplicates)


def read(text: str) -> Any:
    """The mappings, lists, strings, numbers, booleans and nulls in `text`. Raises ValueError with the place of what is not valid."""
    try:
        data = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, TypeError, AttributeError) as error:  # PyYAML raises all of them
        raise ValueError(_reason(error)) from None
    left = [_MOST_VALUES]
    _require_plain(data, "", left, depth=0)
    return data


def _require_plain(value: Any, where: str, left: list[int], depth: int) -> None:
    left[0] -= 1
    if left[0] < 0 or depth > 20:
        raise ValueError("it is too large or too deep when its aliases are expanded")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r}{where and f' in {where}'} is not a name")
            _require_plain(inner, f"{where}.{key}".lstrip("."), left, depth + 1)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            _require_plain(inner, f"{where}.{place}".lstrip("."), left, depth + 1)
    elif isinstance(value, str) and not value.isascii() and value != value.encode(errors="replace").decode():
        raise ValueError(f"{where or 'it'} holds half of a surrogate pair, which is not a character")
    elif value is not None and not isinstance(value, (str, int, float, bool)):
        raise ValueError(f"{where or 'it'} is a {type(value).__name__}; mappings, lists, strings, numbers, true, false and null are valid")


def _reason(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error)[:200] or type(error).__name__
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', None) or 'it ends too early'}"
