"""The configuration: strict reading, ranges, what the environment adds, and that no message holds a value."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, SecretStr

import ditto.config
from ditto.config import (
    Config,
    Endpoint,
    ProviderConfig,
    SandboxConfig,
    StoreConfig,
    load_config,
    load_dotenv_file,
)
from ditto.config_yaml import FILE_MAX_BYTES, is_section, key_paths, unwrapped
from ditto.contracts.model import ModelRef
from ditto.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "ditto.yaml.example"

loose: Any = ditto.config  # for values of the wrong type

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def write_and_load(text: str | bytes, env: Mapping[str, str] | None = None) -> Config:
        file = tmp_path / "ditto.yaml"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_config(file, env or {})

    return write_and_load


def refusal(load: Load, text: str | bytes, env: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, env)
    return caught.value.message


# P01: plain words and numbers never change silently

P01_TEXTS = [
    "no",
    "3.10",
    "1.10",
    "12:30",
    "010",
    "1e3",
    "0123456789",
    "2024-01-01",
    "on",
    "y",
    "0x10",
    "1_000",
    ".inf",
]


@pytest.mark.parametrize("text", P01_TEXTS)
def test_p01_text_fields_keep_what_was_written(load: Load, text: str) -> None:
    config = load(f"sandbox: {{tools: [{text}]}}\nstore:\n  path: {text}\nmodel: openai/{text}\n")
    assert config.sandbox.tools == (text,)
    assert config.store.path == text
    assert config.model == ModelRef("openai", text)


@pytest.mark.parametrize("text", ["null", "~", "Null", "NULL", ""])
def test_p01_nothing_in_a_text_field_is_refused_with_line_and_advice(load: Load, text: str) -> None:
    message = refusal(load, f"store:\n  # a comment\n  path: {text}\n")
    assert "ditto.yaml:3:" in message
    assert "store.path: nothing is written here" in message
    assert "quote it" in message


def test_p01_quoted_text_is_text(load: Load) -> None:
    config = load('sandbox: {tools: ["null", \'no\', "3.10"]}\napp:\n  a: "null"\n  b: \'010\'\n  c: |\n    5\n')
    assert config.sandbox.tools == ("null", "no", "3.10")
    assert config.app == {"a": "null", "b": "010", "c": "5\n"}


@pytest.mark.parametrize(("text", "number"), [("1e3", 1000), ("40", 40), ("4.0e1", 40), ("1000E-1", 100)])
def test_p01_whole_number_fields_accept_json_numbers(load: Load, text: str, number: int) -> None:
    concurrency = load(f"runtime: {{concurrency: {text}}}").runtime.concurrency
    assert concurrency == number
    assert type(concurrency) is int


def test_p01_number_fields_accept_json_numbers(load: Load) -> None:
    assert load("runtime: {step_timeout_s: 1e3, grace_s: 0.5}").runtime.step_timeout_s == 1000.0
    assert load("runtime: {step_timeout_s: null}").runtime.step_timeout_s is None


@pytest.mark.parametrize(
    "text", ["010", "0x10", "1_000", "12:30", "no", '"16"', "16s", "+5", "1.5", "~", "null", "", "[1]"]
)
def test_p01_whole_number_fields_refuse_the_rest(load: Load, text: str) -> None:
    message = refusal(load, f"runtime:\n  concurrency: {text}\n")
    assert "ditto.yaml:2:" in message
    assert "runtime.concurrency: this is a whole number" in message


@pytest.mark.parametrize("text", [".inf", ".nan", "1e400", "-1", "0", "1e999", "9" * 65])
def test_p01_number_fields_refuse_what_is_out_of_range(load: Load, text: str) -> None:
    assert "runtime.step_timeout_s" in refusal(load, f"runtime: {{step_timeout_s: {text}}}")


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "True", "TRUE", '"true"', "1", "0", "null", ""])
def test_p01_truth_values_are_true_and_false_only(load: Load, text: str) -> None:
    message = refusal(load, f"providers:\n  openai:\n    usage_in_stream: {text}\n")
    assert "ditto.yaml:3:" in message
    assert "providers.openai.usage_in_stream: this is true or false" in message


def test_p01_the_case_itself_in_the_free_section(load: Load) -> None:
    case = {
        "country": "no",
        "model": "3.10",
        "version": "1.10",
        "at": "12:30",
        "mode": "010",
        "limit": "1e3",
        "name": "null",
        "number": "0123456789",
        "day": "2024-01-01",
    }
    plain = "app:\n" + "".join(f"  {key}: {text}\n" for key, text in case.items())
    quoted = "app:\n" + "".join(f'  {key}: "{text}"\n' for key, text in case.items())
    message = refusal(load, plain)
    for line, key in enumerate(case, start=2):
        assert any(f"ditto.yaml:{line}:" in problem and f"app.{key}:" in problem for problem in message.splitlines()), (
            key
        )
    assert message.count("quote it") == len(case)
    assert load(quoted).app == case


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("0", 0),
        ("-7", -7),
        ("0.5", 0.5),
        ("20", 20),
        ("EUR", "EUR"),
        ("y", "y"),
        ("v1.10", "v1.10"),
        ("a b", "a b"),
        ("[1, x, {k: 2}]", (1, "x", {"k": 2})),
        ('"5"', "5"),
    ],
)
def test_the_free_section_reads_json(load: Load, text: str, value: Any) -> None:
    found = load(f"app: {{key: {text}}}").app["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["1.0e0", "100000000000000000000", "0.10", "-0x1", "0o17", "1:30", "=", "True", "+1", "089"]
)
def test_the_free_section_refuses_what_would_come_out_changed(load: Load, text: str) -> None:
    message = refusal(load, f"app:\n  key: {text}\n")
    assert "ditto.yaml:2:8: app.key: YAML reads this as" in message


# P03 and P04: nothing is expanded

P03_VALUES = ["abc #tail", "p@ss: word", "*a", "{{b}}", '"q"', "'q'", "x: [y", "%41", "$NAME", "no"]


@pytest.mark.parametrize("value", P03_VALUES)
def test_p03_a_variable_is_the_value_exactly_and_adds_no_key(load: Load, value: str) -> None:
    text = "model: openai/m1\nruntime: {concurrency: 4}\n"
    env = {"OPENAI_BASE_URL": "http://127.0.0.1:9", "OPENAI_API_KEY": value}
    config = load(text, env)
    key = config.endpoint("openai").api_key
    assert key is not None
    assert key.get_secret_value() == value
    assert config.model_dump() == load(text).model_dump()


@pytest.mark.parametrize("value", ["x-secret\nadmin: true", "x-secret\r", "x-secret ", "clé-secrète"])
def test_p03_a_key_that_no_header_can_carry_is_refused_at_start(load: Load, value: str) -> None:
    env = {"OPENAI_BASE_URL": "http://127.0.0.1:9", "OPENAI_API_KEY": value}
    message = refusal(load, "model: openai/m1", env)
    assert message.startswith("OPENAI_API_KEY: ")
    assert "secr" not in message


def test_p03_the_case_itself_is_refused_in_yaml(load: Load) -> None:
    message = refusal(load, "providers:\n  openai:\n    api_key: ${K}\n", {"K": "x\nadmin: true"})
    assert "ditto.yaml:3:" in message
    assert "the variable K" in message or "OPENAI_API_KEY" in message
    assert "admin" not in message


def text_field_documents(
    schema: type[BaseModel], value: Any, around: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Every leaf of the schema, with a document that writes `value` there."""
    for name, field in schema.model_fields.items():
        if field.exclude:
            continue
        wanted, _ = unwrapped(field.annotation)
        keys: tuple[Any, ...] = (*around, name)
        if get_origin(wanted) is Mapping:
            keys = (*keys, "name")
            wanted, _ = unwrapped(get_args(wanted)[1])
        if is_section(wanted):
            yield from text_field_documents(wanted, value, keys)
            continue
        document: Any = [value] if get_origin(wanted) is tuple else value
        for key in reversed(keys):
            document = {key: document}
        path = ".".join(keys) + ("[0]" if get_origin(wanted) is tuple else "")
        yield path, document


FIELDS = [path for path, _ in text_field_documents(Config, "x")]


def test_the_walk_meets_every_leaf() -> None:
    assert {
        "model",
        "app.name",
        "store.path",
        "providers.name.kind",
        "sandbox.read[0]",
        "workers.infer.concurrency",
    } < set(FIELDS)
    assert len(FIELDS) == 30


@pytest.mark.parametrize("value", ["${NOPE}", "prefix-${NOPE}-hunter2", "${NOPE:-hunter2}", "$${NOPE}"])
@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("env", [{}, {"NOPE": ""}, {"NOPE": "hunter2"}], ids=["unset", "empty", "set"])
def test_p04_expansion_is_refused_in_every_field(load: Load, path: str, value: str, env: dict[str, str]) -> None:
    document = dict(text_field_documents(Config, value))[path]
    for style in (json.dumps(document), json.dumps(document).replace('"', "'")):
        message = refusal(load, style, env)
        assert f"{path}: this holds ${{…}} (the variable NOPE)" in message
        assert "hunter2" not in message


def test_p04_an_unexpanded_reference_in_the_environment_is_refused(load: Load) -> None:
    for name, value in [
        ("OPENAI_API_KEY", "${NOPE}"),
        ("OPENAI_BASE_URL", "http://${HOST}/v1"),
        ("DITTO_MODEL", "a/${M}"),
    ]:
        env = {"OPENAI_BASE_URL": "http://127.0.0.1:9", name: value}
        message = refusal(load, "model: openai/m1", env)
        assert message.startswith(f"{name}: this holds")
        assert value not in message


def test_p04_dollars_alone_are_text(load: Load) -> None:
    assert load("app: {a: $NAME, b: $$, c: 'a$'}").app == {"a": "$NAME", "b": "$$", "c": "a$"}
    assert "a key holds" in refusal(load, "app: {'${A}': 1}")


def test_p04_empty_variables_count_as_unset(load: Load) -> None:
    env = {"OPENAI_BASE_URL": "", "OPENAI_API_KEY": "key-of-openai", "DITTO_MODEL": "", "DITTO_STORE": ""}
    config = load("model: openai/m1", env)
    assert config.model == ModelRef("openai", "m1")
    assert config.store.path == ".ditto/ditto.db"
    with pytest.raises(ConfigError, match="OPENAI_BASE_URL"):
        config.endpoint("openai")
    assert load("model: openai/m1", {**env, "OPENAI_BASE_URL": "http://h/v1", "OPENAI_API_KEY": ""}).endpoint(
        "openai"
    ) == Endpoint(base_url="http://h/v1")


# P06: unknown keys


@pytest.mark.parametrize(
    ("text", "place", "path", "advice"),
    [
        ("providers:\n  openai:\n    time_out: 5\n", "3:5", "providers.openai.time_out", "did you mean timeout_s?"),
        ("runtime:\n  time_out: 5\n", "2:3", "runtime.time_out", "did you mean step_timeout_s?"),
        ("runtime:\n  retries_max: 5\n", "2:3", "runtime.retries_max", "known here: concurrency, threads"),
        ("runtime:\n  concurency: 5\n", "2:3", "runtime.concurency", "did you mean concurrency?"),
        ("runtime: {maxIterations: 5}\n", "1:11", "runtime.maxIterations", "did you mean max_iterations?"),
        ("concurrency: 5\n", "1:1", "concurrency", "did you mean runtime.concurrency?"),
        ("sandbox:\n  Tools: [a]\n", "2:3", "sandbox.Tools", "did you mean tools?"),
        ("workers: {infer: {reponse_max_bytes: 5}}", "1:19", "workers.infer.reponse_max_bytes", "response_max_bytes?"),
        ("stroe: {path: x}\n", "1:1", "stroe", "did you mean store?"),
        ("<<: {path: x}\n", "1:1", "merge keys", "write the keys out"),
    ],
)
def test_p06_unknown_keys_are_refused_with_a_suggestion(
    load: Load, text: str, place: str, path: str, advice: str
) -> None:
    message = refusal(load, text)
    assert f"ditto.yaml:{place}: {path}" in message
    assert advice in message


def test_p06_every_problem_is_named_in_the_order_of_the_file(load: Load) -> None:
    message = refusal(load, "runtime:\n  time_out: 3\n  threads: no\n  grace_s: ${G}\nretries_max: 1\n")
    assert [line.split(":")[1] for line in message.splitlines()] == ["2", "3", "4", "5"]


def test_p06_several_values_out_of_range_are_named_together(load: Load) -> None:
    message = refusal(load, "runtime:\n  concurrency: 1025\n  threads: 0\nstore:\n  synchronous: off\n")
    assert [line.split(":")[1:3] for line in message.splitlines()] == [["2", "16"], ["3", "12"], ["5", "16"]]
    assert "runtime.concurrency" in message
    assert "'full' or 'normal'" in message


# What is not YAML for us


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("runtime:\n  threads: 2\n  threads: 3\n", "3:3", "runtime.threads: this key is already on line 2"),
        ("app:\n  a: {b: 1, b: 2}\n", "2:13", "app.a.b: this key is already"),
        ("runtime: {}\nruntime: {}\n", "2:1", "runtime: this key is already on line 1"),
        ("app: &a {x: 1}\n", "1:6", "anchors"),
        ("app:\n  x: &a 1\n", "2:6", "app.x: anchors"),
        ("app:\n  x: *a\n", "2:6", "app.x: aliases"),
        ("app:\n  x: !!python/object/apply:os.system [id]\n", "2:6", "app.x: tags"),
        ("app:\n  x: !!str 5\n", "2:6", "app.x: tags"),
        ("app:\n  x: ! 5\n", "2:6", "app.x: tags"),
        ("app: {x: 1}\n---\napp: {x: 2}\n", "2:1", "a second document"),
        ("app:\n  ? [a]\n  : 1\n", "2:5", "a key is a word"),
        ("app:\n  '': 1\n", "2:3", "a key is a word"),
        ("app:\n  : 1\n", "2:3", "this is not YAML"),
        ("app: {x: 1\n", "2:1", "this is not YAML"),
        ("app:\n\tx: 1\n", "2:1", "this is not YAML"),
        ("app: [" + "[" * 40 + "]" * 41, "1:38", "nested deeper than"),
        ("- runtime\n", "1:1", "this is a section"),
        ("runtime\n", "1:1", "this is a section"),
        ("runtime: [1]\n", "1:10", "runtime: this is a section"),
        ("sandbox:\n  tools: a\n", "2:10", "sandbox.tools: this is a list"),
        ("sandbox:\n  tools: [[a]]\n", "2:11", "sandbox.tools[0]: this is text"),
        ("providers:\n  OpenAI: {}\n", "2:3", "providers.OpenAI: String should match"),
        ("model: gpt\n", "1:8", "model: write it as provider/model-name"),
        ("model: {provider: openai, name: x}\n", "1:8", "model: this is text"),
        ("app: [1]\n", "1:6", "app: this is a section"),
        ("sandbox: {network: [https://a.example/path]}\n", "1:21", "sandbox.network[0]: an origin has no path"),
        ("sandbox: {network: ['*']}\n", "1:21", "sandbox.network[0]: there are no wildcards"),
        ("sandbox: {read: [~/data]}\n", "1:18", "sandbox.read[0]: write the path in full"),
        ("store: {path: ~/x.db}\n", "1:15", "store.path: write the path in full"),
    ],
)
def test_what_is_refused_names_its_place(load: Load, text: str, place: str, words: str) -> None:
    message = refusal(load, text)
    assert f"ditto.yaml:{place}: " in message
    assert words in message


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "{}\n", "runtime:\nproviders:\napp:\nsandbox:\n  tools:\n", "\ufeff{}"]
)
def test_empty_files_and_sections_are_the_defaults(load: Load, text: str) -> None:
    assert load(text) == Config()


def test_a_provider_with_nothing_below_it_has_the_defaults(load: Load) -> None:
    assert load("providers:\n  openai:\n").providers == {"openai": ProviderConfig()}


def test_files_that_cannot_be_read(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "absent.yaml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, {})
    assert "yaml:2: the file is not UTF-8" in refusal(load, b"app:\n  x: \xff\n")
    assert "yaml:2: there is a character" in refusal(load, b"app:\n  x: \x07\n")
    assert "larger than" in refusal(load, b"#" * (FILE_MAX_BYTES + 1))


# Credentials


@pytest.mark.parametrize(
    "text",
    [
        "providers: {openai: {api_key: zq-7f3-secret}}",
        "providers: {openai: {base_url: https://zq-7f3-secret.example}}",
        "providers: {openai: {headers: {X-Team: zq-7f3-secret}}}",
        "endpoints: {openai: {base_url: https://zq-7f3-secret.example}}",
        "apiKey: zq-7f3-secret",
        "app: {shop: {password: zq-7f3-secret}}",
        "app: {shop: [{db_password: zq-7f3-secret}]}",
        "app: {openaiApiKey: zq-7f3-secret}",
        "app: {token: zq-7f3-secret}",
        "app: {database: 'postgres://user:zq-7f3-secret@db/x'}",
        "app: {header: Bearer zq-7f3-secret}",
        "sandbox: {network: ['https://user:zq-7f3-secret@api.example.com']}",
    ],
)
def test_credentials_are_refused_and_not_echoed(load: Load, text: str) -> None:
    message = refusal(load, text)
    assert "ditto.yaml:1:" in message
    assert "put them in .env or the environment" in message
    assert "zq-7f3-secret" not in message


def test_words_that_only_look_like_credentials_are_fine(load: Load) -> None:
    app = {"max_tokens": 5, "pad_token": "<pad>", "secrets": ["a"], "password": False, "keyboard": "us", "at": "a@b.c"}
    app |= {"plan": "basic plan", "repository": "ssh://git@example.com/x", "page": "https://a.example/@b"}
    assert load(f"app: {json.dumps(app)}").model_dump()["app"] == app


@pytest.mark.parametrize(
    "text",
    [
        "runtime: {concurrency: zq-7f3-secret}",
        "model: zq-7f3-secret",
        "store: {synchronous: zq-7f3-secret}",
        "zq-7f3-secret",
        "a: 'zq-7f3-secret",
    ],
)
def test_no_message_echoes_a_value(load: Load, text: str) -> None:
    assert "zq-7f3-secret" not in refusal(load, text)


def test_errors_carry_no_value_along(load: Load) -> None:
    for build in (
        lambda: load("store: {synchronous: zq-7f3-secret}"),
        lambda: StoreConfig(synchronous="zq-7f3-secret"),  # type: ignore[arg-type]
        lambda: Endpoint(base_url="http://user:zq-7f3-secret@h"),
        lambda: ModelRef.parse("zq-7f3-secret"),
    ):
        with pytest.raises(ConfigError) as caught:
            build()
        assert "zq-7f3-secret" not in str(caught.value)
        assert caught.value.__context__ is None
        assert caught.value.__cause__ is None


# The environment


def test_the_environment_overrides_the_file_and_only_the_given_mapping_is_read(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DITTO_MODEL", "other/m9")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://other/v1")
    text = "model: openai/m1\nstore: {path: a.db, synchronous: normal}\nproviders: {local_2: {timeout_s: 5}}\n"
    plain = load(text)
    assert (plain.model, plain.endpoints) == (ModelRef("openai", "m1"), {})
    env = {
        "DITTO_MODEL": "openai/family/m2",
        "DITTO_STORE": "b.db",
        "OPENAI_BASE_URL": "https://API.example.com/v1/",
        "OPENAI_API_KEY": "key-of-openai",
        "LOCAL_2_BASE_URL": "http://127.0.0.1:8080",
        "UNLISTED_BASE_URL": "http://127.0.0.1:8081",
    }
    config = load(text, env)
    assert str(config.model) == "openai/family/m2"
    assert config.store == StoreConfig(path="b.db", synchronous="normal")
    assert config.endpoints == {
        "openai": Endpoint(base_url="https://api.example.com/v1", api_key=SecretStr("key-of-openai")),
        "local_2": Endpoint(base_url="http://127.0.0.1:8080"),
    }
    assert config.providers == {"openai": ProviderConfig(), "local_2": ProviderConfig(timeout_s=5)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DITTO_MODEL", "zq-7f3-secret"),
        ("DITTO_MODEL", "a/zq-7f3-secret\n"),
        ("DITTO_STORE", "~/zq-7f3-secret"),
        ("OPENAI_BASE_URL", "zq-7f3-secret"),
        ("OPENAI_BASE_URL", "ftp://zq-7f3-secret"),
        ("OPENAI_BASE_URL", "http://user:zq-7f3-secret@host"),
        ("OPENAI_BASE_URL", "http://zq-7f3-secret:port"),
        ("OPENAI_BASE_URL", "http://h/v1#zq-7f3-secret"),
        ("OPENAI_BASE_URL", "http://h /zq-7f3-secret"),
        ("OPENAI_BASE_URL", "http:///zq-7f3-secret"),
    ],
)
def test_a_wrong_variable_is_named_and_not_echoed(load: Load, name: str, value: str) -> None:
    message = refusal(load, "model: openai/m1", {name: value})
    assert message.startswith(f"{name}: ")
    assert "zq-7f3-secret" not in message


@pytest.mark.parametrize(
    ("written", "kept", "chat"),
    [
        ("http://h/v1/", "http://h/v1", "http://h/v1/chat"),
        ("http://h/", "http://h", "http://h/chat"),
        ("HTTP://H:80/V1", "http://h:80/V1", "http://h:80/V1/chat"),
        ("http://[::1]:8080/v1", "http://[::1]:8080/v1", "http://[::1]:8080/v1/chat"),
        ("http://h/v1/?key=a/b/", "http://h/v1?key=a/b/", "http://h/v1/chat?key=a/b/"),
        ("http://h?", "http://h", "http://h/chat"),
    ],
)
def test_base_urls(written: str, kept: str, chat: str) -> None:
    endpoint = Endpoint(base_url=written)
    assert endpoint.base_url == kept
    assert endpoint.url("/chat") == endpoint.url("chat") == chat


SECRET_ENDPOINT = Endpoint(
    base_url="http://h/v1?key=query-secret-1&sig=a%2Fb%2Bc-secret&flag-secret&short=abc&",
    api_key=SecretStr("key-secret-2"),
    headers={"X-Team": SecretStr("header-secret-3"), "X-Short": SecretStr("abc")},
)


def test_h10_secrets_are_keys_headers_and_query_values() -> None:
    config = Config(endpoints={"a": SECRET_ENDPOINT, "b": SECRET_ENDPOINT})
    assert sorted(config.secrets()) == [
        "a%2Fb%2Bc-secret",
        "a/b+c-secret",
        "flag-secret",
        "header-secret-3",
        "key-secret-2",
        "query-secret-1",
    ]
    assert Config().secrets() == ()


def test_h10_nothing_that_is_shown_holds_a_secret() -> None:
    config = Config(endpoints={"a": SECRET_ENDPOINT})
    shown = [
        repr(config),
        str(config),
        f"{config!r:>5}",
        repr(config.endpoints),
        repr(SECRET_ENDPOINT),
        str(SECRET_ENDPOINT),
    ]
    shown += [str(config.model_dump()), config.model_dump_json(), SECRET_ENDPOINT.address]
    shown += [str(SECRET_ENDPOINT.model_dump()), SECRET_ENDPOINT.model_dump_json()]
    for text in shown:
        assert "secret-" not in text
        assert "b%2Bc" not in text
        assert "flag-secret" not in text
        assert "abc" not in text
    assert "X-Team" in repr(config)


@pytest.mark.parametrize("headers", [{"X Team": "v"}, {"": "v"}, {"X:": "v"}, {"X": "a\nb"}, {"X": ""}, {"X": " a"}])
def test_headers_that_cannot_be_sent_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="Endpoint: headers: "):
        Endpoint(base_url="http://h", headers=headers)  # type: ignore[arg-type]


# .env


def test_dotenv_values_are_taken_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "expanded")
    file = tmp_path / ".env"
    file.write_text(
        "# c\nA=1\nexport B='x #y'\nC=\"p@ss: word\"\nD=${OTHER}\nE=$OTHER\nF=\nG\nH=abc #tail\nI='${OTHER}'\n"
    )
    assert load_dotenv_file(file) == {
        "A": "1",
        "B": "x #y",
        "C": "p@ss: word",
        "D": "${OTHER}",
        "E": "$OTHER",
        "F": "",
        "H": "abc",
        "I": "${OTHER}",
    }
    assert load_dotenv_file(tmp_path / "absent") == {}


def test_a_wrong_dotenv_line_is_named_and_not_echoed(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("A=1\nKEY='zq-7f3-secret\n")
    with pytest.raises(ConfigError) as caught:
        load_dotenv_file(file)
    assert caught.value.message.startswith(f"{file}:2: ")
    assert "zq-7f3-secret" not in caught.value.message


def test_the_real_environment_wins_over_the_file(load: Load, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("OPENAI_BASE_URL=http://file/v1\nOPENAI_API_KEY=key-of-file\n")
    env = {**load_dotenv_file(tmp_path / ".env"), "OPENAI_API_KEY": "key-of-env"}
    assert load("model: openai/m1", env).endpoint("openai") == Endpoint(
        base_url="http://file/v1", api_key=SecretStr("key-of-env")
    )


# In Python


def test_config_in_python() -> None:
    config = Config(
        model=ModelRef("scripted", "m1"), endpoints={"scripted": Endpoint(base_url="http://127.0.0.1:9/v1/")}
    )
    assert (
        config.provider("scripted") == ProviderConfig() == config.providers["scripted"] == config.provider("unlisted")
    )
    assert config.endpoint("scripted").base_url == "http://127.0.0.1:9/v1"
    with pytest.raises(ConfigError, match="OTHER_BASE_URL"):
        config.endpoint("other")
    assert Config.model_validate({"model": "openai/a/b"}).model == ModelRef("openai", "a/b")
    assert Config(sandbox=SandboxConfig(tools=["a"])).sandbox.tools == ("a",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: loose.RuntimeConfig(concurrency=True), "RuntimeConfig: concurrency: "),
        (lambda: loose.RuntimeConfig(concurrency="16"), "RuntimeConfig: concurrency: "),
        (lambda: loose.RuntimeConfig(step_timeout_s=float("inf")), "RuntimeConfig: step_timeout_s: "),
        (lambda: loose.RuntimeConfig(time_out=1), "RuntimeConfig: time_out: "),
        (lambda: loose.Config(runtime={"concurrency": 0}), "Config: runtime.concurrency: "),
        (lambda: loose.Config(providers={"Q": {}}), "Config: providers.Q: "),
        (lambda: loose.Config(model="gpt"), "Config: model: write it as"),
        (lambda: loose.Config(app={"at": object()}), "Config: app: the data is JSON"),
        (lambda: loose.Config(app={"at": float("nan")}), "Config: app: the data is JSON"),
        (lambda: loose.Config(app={"key": SecretStr("x")}), "Config: app: the data is JSON"),
        (lambda: loose.Config(app={"a": {1: "x"}}), "Config: app: a key is a text"),
        (lambda: loose.Config(app=[1]), "Config: app: "),
        (lambda: loose.SandboxConfig(tools="shop"), "SandboxConfig: tools: "),
    ],
)
def test_wrong_values_in_python_are_config_errors(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.message.startswith(words)


def test_a_config_never_changes() -> None:
    app: dict[str, Any] = {"shops": [{"name": "a"}]}
    config = Config(app=app, model=ModelRef("scripted", "m1"))
    app["shops"][0]["name"] = "b"
    assert config.app["shops"][0]["name"] == "a"
    for change in (
        lambda: setattr(config, "model", None),
        lambda: setattr(config.runtime, "threads", 1),
        lambda: config.app.update(x=1),  # type: ignore[attr-defined]
        lambda: config.app["shops"].append(1),
        lambda: config.app["shops"][0].update(name="c"),
        lambda: config.providers.pop("scripted"),  # type: ignore[attr-defined]
        lambda: config.endpoints.update(x=1),  # type: ignore[attr-defined]
    ):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            change()
    assert copy.deepcopy(config) == config
    assert Config(**dict(config)) == config
    assert json.loads(config.model_dump_json())["app"] == {"shops": [{"name": "a"}]}


@pytest.mark.parametrize(
    "text", ["", "a", "/b", "a/", "A/b", "a b/c", "1a/b", "a/b\n", "a/ b", "a/\x00", "a/" + "x" * 257, "a" * 65 + "/b"]
)
def test_wrong_models_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="this is no model"):
        ModelRef.parse(text)


def test_models_come_back_as_they_were() -> None:
    ref = ModelRef.parse("openai/meta/llama-3.1:8b@fp8 v2")
    assert (ref.provider, ref.name) == ("openai", "meta/llama-3.1:8b@fp8 v2")
    assert str(ref) == ref.key == "openai/meta/llama-3.1:8b@fp8 v2"
    assert ModelRef.parse(str(ref)) == ref
    assert ModelRef.model_validate_json(ref.model_dump_json()) == ref
    assert hash(ModelRef("a", "b")) == hash(ModelRef.parse("a/b"))


# The examples


def test_the_example_loads_and_states_the_defaults() -> None:
    config = load_config(EXAMPLE, {})
    assert config == Config(providers={"openai": ProviderConfig()})


def test_the_example_names_every_key() -> None:
    text = EXAMPLE.read_text()
    for path in key_paths(Config):
        assert f"{path.rpartition('.')[2]}:" in text, path


def test_the_dotenv_example_loads() -> None:
    env = load_dotenv_file(ROOT / ".env.example")
    config = load_config(EXAMPLE, env)
    assert set(env) == {"OPENAI_BASE_URL", "OPENAI_API_KEY", "DITTO_MODEL"}
    assert config.model is not None
    assert config.endpoint("openai") == Endpoint(base_url="https://api.openai.com/v1")


def test_importing_is_light() -> None:
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]; import ditto.config, ditto.sandbox, ditto.secrets; "
        "print([m for m in ('yaml', 'dotenv', 'httpx', 'sqlalchemy', 'networkx', 'alembic') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
