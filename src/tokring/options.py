"""Where option values come from: command line, else environment (TOKRING_*), else `--config` file, else default."""

import argparse
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from tokring.config import Config, ConfigError, config_from_options, field_types, flag_of, sections

ENVIRONMENT_PREFIX = "TOKRING_"
CONFIG_FILE_OPTION = "config"
SIZE_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def all_fields() -> Iterator[tuple[Field[Any], Any]]:
    """Every option of every section with its type."""
    for section in sections().values():
        types_of = field_types(section)
        for item in fields(section):
            yield item, types_of[item.name]


def parse_integer(text: str) -> int:
    """An integer, with vLLM's size suffixes: 2k = 2000, 2K = 2048, 1.5G. Raises ValueError."""
    factor = SIZE_SUFFIXES.get(text[-1:])
    if factor is None:
        return int(text)
    value = float(text[:-1]) * factor
    if not value.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(value)


def parse_boolean(text: str) -> bool:
    """1/0, true/false, yes/no, on/off. Raises ValueError."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def base_type(annotation: Any) -> Any:
    """The type of a value that is given: X for X | None, str for a Literal."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return str if get_origin(annotation) is Literal else annotation


def parse_text(source: str, annotation: Any, text: str) -> Any:
    """A value from text that stood behind `source`: a flag, a variable, a key. Raises ConfigError that names it."""
    kind = base_type(annotation)
    try:
        if kind is bool:
            return parse_boolean(text)
        if kind is int:
            return parse_integer(text)
        if kind is float:
            return float(text)
        if get_origin(kind) is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return text
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{source}{text}: {error}") from None


def parse_yaml_value(name: str, annotation: Any, value: Any) -> Any:
    """A value from the configuration file, of the field's type. Raises ConfigError."""
    kind = base_type(annotation)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(str(part) for part in value)
    if isinstance(value, str):
        return parse_text(f"{flag_of(name)[2:]} in the configuration file: ", annotation, value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind and not (kind is str and type(value) in (int, float)):
        expected = "list" if get_origin(kind) is tuple else kind.__name__
        raise ConfigError(f"{name.replace('_', '-')} in the configuration file: {value!r} is not of type {expected}")
    return str(value) if kind is str else value


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Options given as TOKRING_*; variables that name no option are ignored."""
    found = {}
    for item, annotation in all_fields():
        variable = ENVIRONMENT_PREFIX + item.name.upper()
        text = environment.get(variable)
        if text is not None:
            found[item.name] = parse_text(f"{variable}=", annotation, text)
    return found


def read_config_file(path: str) -> dict[str, Any]:
    """Options of a YAML file; keys are flag names without the dashes in front. Raises ConfigError."""
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config {path}: must be a mapping of option names to values")
    types_of = {item.name: annotation for item, annotation in all_fields()}
    found = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name not in types_of:
            raise ConfigError(f"--config {path}: unknown option {key!r}")
        found[name] = parse_yaml_value(name, types_of[name], value)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every option to `tokring serve`. A flag that is not given leaves no attribute behind."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="same as --model")
    parser.add_argument(
        flag_of(CONFIG_FILE_OPTION),
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help="file with any of these options",
    )
    for section in sections().values():
        group = parser.add_argument_group((section.__doc__ or "").splitlines()[0].rstrip("."))
        for item in fields(section):
            add_argument(group, item, field_types(section)[item.name])


def add_argument(group: Any, item: Field[Any], annotation: Any) -> None:
    """One flag; its shape follows from the field's type."""
    kind = base_type(annotation)
    help_text = item.metadata["help"].replace("%", "%%")
    if item.default not in (None, (), "") and kind is not bool:
        shown = " ".join(item.default) if isinstance(item.default, tuple) else item.default
        help_text += f" (default: {shown})"
    keywords: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": help_text}
    if kind is bool:
        group.add_argument(flag_of(item.name), action=argparse.BooleanOptionalAction, **keywords)
        return
    keywords["metavar"] = item.metadata["metavar"] or item.name.rsplit("_", 1)[-1].upper()
    if get_origin(annotation) is Literal:
        keywords["metavar"] = "{" + ",".join(get_args(annotation)) + "}"
    if get_origin(kind) is tuple:
        keywords["nargs"] = "+"
    group.add_argument(flag_of(item.name), **keywords)


def read_command_line(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options given as flags. Raises ConfigError."""
    given = vars(arguments)
    found: dict[str, Any] = {}
    for item, annotation in all_fields():
        if item.name not in given:
            continue
        value = given[item.name]
        if isinstance(value, list):
            found[item.name] = tuple(value)
        else:
            found[item.name] = (
                value if isinstance(value, bool) else parse_text(f"{flag_of(item.name)} ", annotation, value)
            )
    if "model_argument" in given:
        if found.get("model", given["model_argument"]) != given["model_argument"]:
            raise ConfigError(f"two models given: {given['model_argument']} and --model {found['model']}")
        found["model"] = given["model_argument"]
    return found


def build_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Merges all sources. Raises ConfigError with one line that names the option."""
    given = vars(arguments)
    path = given.get(CONFIG_FILE_OPTION, environment.get(ENVIRONMENT_PREFIX + CONFIG_FILE_OPTION.upper()))
    from_file = read_config_file(path) if path else {}
    return config_from_options({**from_file, **read_environment(environment), **read_command_line(arguments)})


def parse_serve_arguments(argv: Sequence[str], environment: Mapping[str, str]) -> Config:
    """`tokring serve`'s command line to a Config, for tests and programs. Raises ConfigError or SystemExit."""
    parser = argparse.ArgumentParser(prog="tokring serve")
    add_arguments(parser)
    return build_config(parser.parse_args(argv), environment)
