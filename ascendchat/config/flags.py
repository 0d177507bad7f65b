"""Flags and YAML files into one frozen dataclass per command.

    @dataclass(frozen=True)
    class PlanConfig:
        "# Model"
        depth: int = option(20, least=1, most=1000)
        "number of layers"

The string under a field is its help; a string that begins with `# ` is the heading of the fields below it (help.py).
Every number says its range where it is declared; flags and YAML are held to it, and help shows it.
`parse(PlanConfig, ["--depth", "12"])` reads flags, and a YAML file named by `--config`; flags win over the file,
the file over the defaults. `--device_batch_size` and `--device-batch-size` are the same flag. No torch here: `--help`
must be instant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from ascendchat.config.help import Range
from ascendchat.config.language import translate
from ascendchat.errors import UserError, nearest

C = TypeVar("C")


class UnknownSetting(UserError):
    """A flag or a key of a YAML file that the command does not have; `name` is how its field would be called."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def option(default: Any = dataclasses.MISSING, *, also: tuple[str, ...] = (), words: str = "", **bounds: Any) -> Any:
    """A field with further flags for the same value (`also=("npus",)`), or filled from bare words: `words="each"` takes
    every bare word, `words="rest"` the first bare word and all that follows it, flags included. `bounds` are those of
    Range, for numbers: `least=1, most=8`."""
    return dataclasses.field(default=default, metadata={"also": also, "words": words, "range": Range(**bounds)})


def wants_help(argv: list[str]) -> bool:
    """True when `--help` stands before any `--` separator."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return "--help" in own or "-h" in own


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


@functools.cache
def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def convert(flag: str, kind: Any, value: Any) -> Any:
    """The text of a flag, or a YAML value, as a value of the type `kind`; a UserError says what was expected."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in args and (value is None or str(value).lower() in ("none", "null", "auto")):
            return None
        return convert(flag, next(a for a in args if a is not type(None)), value)
    if origin is typing.Literal:
        if str(value) in [str(a) for a in args]:
            return next(a for a in args if str(a) == str(value))
        raise UserError(f"{flag}: {value!r} is not a valid value; {nearest(str(value), [str(a) for a in args])}")
    if origin is tuple:
        items = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            items = [items]
        return tuple(convert(flag, args[0], item) for item in items)
    if kind is bool:
        text = str(value).lower()
        if text in ("true", "1", "yes", "on"):
            return True
        if text in ("false", "0", "no", "off"):
            return False
        raise UserError(f"{flag}: {value!r} is not true or false")
    if kind in (int, float):
        try:
            return _number(kind, value)
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"{flag}: {value!r} is not a {'whole ' if kind is int else ''}number") from None
    if kind is str:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return str(value)
        raise UserError(f"{flag}: YAML reads this as {value!r}, not as text; put it in quotes")
    if kind is dict or origin is dict:
        if isinstance(value, dict):
            return value
        raise UserError(f"{flag}: expected a mapping (give it in a YAML file), found {value!r}")
    raise UserError(f"{flag}: {value!r} cannot be read as {kind}")


def _number(kind: type, value: Any) -> int | float:
    if isinstance(value, bool):  # `depth: yes` in YAML
        raise TypeError
    if kind is float:
        if not math.isfinite(float(value)):
            raise ValueError
        return float(value)
    with contextlib.suppress(ValueError):
        if not isinstance(value, float):
            return int(value)
    if not float(value).is_integer():  # 1e9 is a whole number too
        raise ValueError
    return int(float(value))


def accept(name: str, field: dataclasses.Field[Any], kind: Any, value: Any) -> Any:
    """Convert a value to the field's type; a UserError if it is out of range, or empty where the default is not."""
    converted = convert(name, kind, value)
    for item in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(item, (int, float)) and not isinstance(item, bool) and item not in _range(field):
            raise UserError(f"{name} must be {_range(field)}, found {item}")
    if converted in ("", ()) and converted != field.default:
        raise UserError(f"{name} must not be empty; leave it out for the default")
    return converted


def _range(field: dataclasses.Field[Any]) -> Range:
    bounds: Range = field.metadata.get("range", Range())
    return bounds


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping; a missing or broken file is an error that names it."""
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if twice := doubled(node, set()):
            key, first, second = twice
            raise UserError(f"{path}: `{key}` stands twice, in line {first} and in line {second}; leave one out")
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise UserError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{path} is not valid YAML: it is nested too deep; write it flatter") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold `name: value` lines, found {type(content).__name__}")
    return content


def doubled(node: Any, seen: set[int]) -> tuple[str, int, int] | None:
    """Find the first duplicate key in composed YAML (PyYAML would take the last): the key and its two lines. `seen`
    holds the ids of visited nodes, because an alias is the same node again."""
    parts = getattr(node, "value", None)
    if not isinstance(parts, list) or id(node) in seen:
        return None
    seen.add(id(node))
    lines: dict[tuple[str, str], int] = {}
    for part in parts:
        key, inner = part if isinstance(part, tuple) else (None, part)
        if isinstance(getattr(key, "value", None), str):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                return key.value, lines[name], line
            lines[name] = line
        if twice := doubled(inner, seen):
            return twice
    return None


def flags_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Every spelling of every flag, with underscores and without leading dashes -> the field that it sets."""
    spellings: dict[str, dataclasses.Field[Any]] = {}
    for field in dataclasses.fields(cls):
        for name in (field.name, *field.metadata.get("also", ())):
            spellings[_plain(name)] = field
    return spellings


def _split(cls: type, argv: list[str]) -> tuple[dict[str, Any], list[str], str | None]:
    """argv -> ({field: value}, bare words, path of --config)."""
    spellings, kinds = flags_of(cls), _types(cls)
    takes_rest = any(f.metadata.get("words") == "rest" for f in dataclasses.fields(cls))
    by_flag: dict[str, Any] = {}
    words: list[str] = []
    config_file: str | None = None
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--" and not takes_rest:  # users of torchrun write `-- --flags`
            continue
        bare = not token.startswith("-") or token == "-" or token[1].isdigit()
        if bare or (takes_rest and token in ("--", "-m")):
            words.append(token)
            if takes_rest:
                words += rest
                break
            continue
        name, equals, value = token.partition("=")
        key = _plain(name)
        if key == "config":
            config_file = value if equals else _value(name, rest)
            continue
        negated = key not in spellings and key.startswith("no_") and key[3:] in spellings
        field = spellings.get(key[3:] if negated else key)
        if field is None:
            _refuse(cls, key, name)
            names = [spelling(n) for n in [*spellings, "config"]]
            raise UnknownSetting(f"unknown flag {name}; {nearest(name, names)}", key)
        if kinds[field.name] in (bool, bool | None) and not equals:
            by_flag[field.name] = not negated
            if not negated and rest and rest[0].lower() in ("true", "false", "1", "0"):
                by_flag[field.name] = convert(name, bool, rest.pop(0))
            continue
        if negated:
            raise UserError(f"{name}: only a switch can be negated, and takes no value then; use {spelling(key[3:])}")
        text = value if equals else _value(name, rest)
        if not text.strip():  # most often a shell variable that is not set
            raise UserError(f"{name} has an empty value; leave the flag out for the default")
        by_flag[field.name] = accept(name, field, kinds[field.name], text)
    return by_flag, words, config_file


def spelling(name: str) -> str:
    """A field's flag as users type it: device_type -> --device-type, p -> -p."""
    return ("-" if len(name) == 1 else "--") + name.replace("_", "-")


def _value(name: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise UserError(f"{name} needs a value")
    return rest.pop(0)


def accept_all(cls: type, settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Check the settings of a YAML file: field -> value in its type and range. Error messages begin with `where`."""
    spellings, kinds = flags_of(cls), _types(cls)
    values: dict[str, Any] = {}
    key_of: dict[str, Any] = {}  # field -> the key that set it
    for key, value in settings.items():
        field = spellings.get(_plain(str(key)))
        if field is None and _is_dropped(cls, _plain(str(key)), value, f"{where}: {key}"):
            continue
        if field is None:
            names = [f.name for f in dataclasses.fields(cls)]
            text = f"{where}: unknown setting {key}; {nearest(_plain(str(key)), names)}"
            raise UnknownSetting(text, _plain(str(key)))
        accepted = accept(f"{where}: {key}", field, kinds[field.name], value)
        if values.setdefault(field.name, accepted) != accepted:
            raise UserError(f"{where}: {key_of[field.name]} and {key} say the same; leave one out")
        key_of[field.name] = key
    return values


def parse(cls: type[C], argv: list[str]) -> C:
    """The command's config from its flags and its YAML file; a UserError names the nearest valid name."""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    kinds = _types(cls)  # type: ignore[arg-type]
    by_flag, words, config_file = _split(cls, argv)
    takes_words = any(f.metadata.get("words") for f in fields.values())
    if config_file is None and len(words) == 1 and words[0].endswith((".yaml", ".yml")) and not takes_words:
        config_file = words.pop()
    values = accept_all(cls, load_yaml(config_file), config_file) if config_file is not None else {}
    values.update(by_flag)
    receiver = next((f for f in fields.values() if f.metadata.get("words")), None)
    if words and receiver is None:
        raise UserError(f"unexpected argument {words[0]!r}; flags are written {spelling(next(iter(fields)))} VALUE")
    if words and receiver is not None:
        many, name = typing.get_origin(kinds[receiver.name]) is tuple, receiver.name.upper()
        if not many and len(words) > 1:
            raise UserError(f"one {receiver.name} expected, found {len(words)}: {' '.join(words)}")
        if receiver.metadata["words"] == "each" and not all(word.strip() for word in words):
            raise UserError(f"{name} has an empty value; leave it out for the default")
        values[receiver.name] = accept(name, receiver, kinds[receiver.name], words if many else words[0])
    missing = [f.name for f in fields.values() if f.name not in values and _required(f)]
    if missing:
        shown = [n.upper() if fields[n].metadata.get("words") else spelling(n) for n in missing]
        raise UserError(f"missing {', '.join(shown)}; see --help")
    return cls(**values)


def _is_off(value: Any) -> bool:
    """True for a setting that asks for nothing: absent, empty, zero or switched off."""
    return not value or str(value).lower() in ("none", "no")


def _is_dropped(cls: type, key: str, value: Any, name: str) -> bool:
    """True for a key that `not_used` or `refused` of the class names and that may be dropped: it is off, or rank 0 has
    printed what the command does instead. A refused one that is not off is a UserError."""
    not_used, refused = getattr(cls, "not_used", {}), getattr(cls, "refused", {})
    if key not in not_used and key not in refused:
        return False
    if not _is_off(value):
        if key in refused:
            _refuse(cls, key, name)
        if os.environ.get("RANK", "0") == "0":
            print(translate(f"{name} is not used: {not_used[key]}"), file=sys.stderr)
    return True


def _refuse(cls: type, key: str, name: str) -> None:
    """Raise a UserError for a setting of another program, or of an earlier version, that this command does not have."""
    reasons = {**getattr(cls, "not_used", {}), **getattr(cls, "refused", {})}
    if key in reasons:
        raise UserError(f"{name} is not done here: {reasons[key]}; leave it out")


def flags_set(config: Any, names: Iterable[str]) -> list[str]:
    """The flags of those of the named fields that are neither empty, zero nor off."""
    return [spelling(name) for name in names if getattr(config, name)]


def stored_settings(cls: type, stored: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config.yaml of an earlier version: the settings by today's names, and those that the class has lost since and
    that were not at their default. Those at `refused` were all off by default."""
    spellings, refused = flags_of(cls), getattr(cls, "refused", {})
    settings = {spellings[key].name: value for key, value in stored.items() if key in spellings}
    return settings, {key: value for key, value in stored.items() if key in refused and not _is_off(value)}


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def as_dict(config: Any) -> dict[str, Any]:
    """The fields of a config as plain values, ready for JSON or YAML."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


def dump(config: Any) -> str:
    """The config as YAML that `--config` reads back."""
    import yaml

    values = as_dict(config)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    try:
        exact = yaml.safe_load(text) == values
    except yaml.YAMLError:
        exact = False
    # The readable form loses Unicode line breaks (U+0085, U+2028); the escaped one loses nothing.
    return text if exact else yaml.safe_dump(values, sort_keys=False)
