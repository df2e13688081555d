"""Whatever a recipe, a file of token records, a calibration set, a provenance or measurements hold: gemq's own errors, in one sentence, or sense."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from targets import READERS, refusal

EXAMPLES = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

_scalars = (st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
            | st.sampled_from([2**63, -1, 10**400, "re:(", "re:.*", "keep", "../x", "a\n", "\x1b[31m", "x" * 3000, "0" * 64]))  # fmt: skip
_any = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12)


def dumped(document: object) -> bytes:
    try:
        return json.dumps(document).encode()
    except ValueError:  # more digits than Python prints
        return b'{"id": ' + b"9" * 5000 + b"}"


@pytest.mark.parametrize("name", READERS)
def test_every_reader_accepts_its_sound_inputs(name: str) -> None:
    assert [refusal(READERS[name], seed) for seed in READERS[name].seeds] == [""] * len(READERS[name].seeds)


@st.composite
def damaged(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A sound input with some of its bytes changed, cut out, doubled or replaced by what is special to JSON and YAML."""
    raw = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        end = min(len(raw), at + draw(st.integers(0, 12)))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            raw[at:end] = draw(st.binary(max_size=6))
        elif kind == 1:
            raw[at:at] = raw[at:end]
        elif kind == 2:
            raw[at:end] = draw(st.sampled_from([b"null", b"[", b"{", b"}", b"]", b"-1", b"1e999", b"NaN", b"9" * 4400, b"\\ud800", b"&a", b"*a",
                                                b"!!python/object:os.system", b"!!timestamp 9999-99-99", b"<<: ", b"? ", b"\n", b"\xff",
                                                b"\xe2\x80\xa8"]))  # fmt: skip
        else:
            del raw[at:end]
    return bytes(raw)


@pytest.mark.parametrize("name", READERS)
def test_damaged_bytes_are_refused_in_a_sentence_or_make_sense(name: str) -> None:
    @EXAMPLES
    @given(damaged(READERS[name].seeds) | st.binary(max_size=100))
    def attack(raw: bytes) -> None:
        refusal(READERS[name], raw)

    attack()


_weights = st.fixed_dictionaries({}, optional={
    "num_bits": st.sampled_from([4, 8]) | _scalars, "type": st.sampled_from(["int", "float"]) | _scalars,
    "group_size": st.sampled_from([32, 128]) | _scalars, "strategy": st.sampled_from(["group", "channel"]) | _scalars,
    "symmetric": _scalars, "observer": st.sampled_from(["mse"]) | _scalars}) | _any  # fmt: skip
_inputs = st.fixed_dictionaries({"type": st.sampled_from(["int", "float"]) | _scalars}, optional={"dynamic": _any}) | _any
_scheme = st.fixed_dictionaries({"weights": _weights}, optional={"input_activations": _inputs}) | st.just("keep") | _any
_match = st.lists(st.sampled_from(["decoder", "mlp", "ple", "lm_head", "re:.*q_proj"]) | _scalars, max_size=3) | _any
_rule = st.fixed_dictionaries({"match": _match, "scheme": _scheme}, optional={"method": st.just("rtn") | _any, "more": _any}) | _any
_options = st.fixed_dictionaries({}, optional={"actorder": st.just("static") | _any, "dampening": _scalars, "block_size": _scalars}) | _any
_recipe = st.fixed_dictionaries(
    {"version": st.just(1) | _scalars, "name": st.just("a") | _scalars, "summary": st.just("A.") | _any, "rules": st.lists(_rule, max_size=3) | _any},
    optional={"method": st.sampled_from(["gptq", "rtn"]) | _any, "gptq": _options, "drop_redundant_kv": _scalars, "more": _any})  # fmt: skip


@EXAMPLES
@given(_recipe | _any)
def test_a_recipe_is_refused_in_a_sentence_or_read_back_as_it_was_written(document: object) -> None:
    try:
        raw = yaml.safe_dump(document, allow_unicode=True).encode()
    except (UnicodeEncodeError, ValueError):
        raw = dumped(document)
    refusal(READERS["recipe"], raw)


_ids = st.lists(st.integers(-1, 600) | _scalars, max_size=4) | _any
_record = st.fixed_dictionaries({"id": st.integers(0, 3) | _any, "context_token_ids": _ids, "target_token_ids": _ids}, optional={"more": _any}) | _any
_sound_ids = st.lists(st.integers(0, 511), min_size=1, max_size=4)
_sound_record = st.fixed_dictionaries({"id": st.integers() | st.text(max_size=4), "context_token_ids": _sound_ids, "target_token_ids": _sound_ids})


@EXAMPLES
@given(st.lists(_record | _sound_record, max_size=4))
@example([{"id": 10**5000, "context_token_ids": [1], "target_token_ids": [2]}])
def test_token_records_are_refused_in_a_sentence_or_right(documents: list[object]) -> None:
    raw = b"\n".join(map(dumped, documents))
    refusal(READERS["records"], raw)


@EXAMPLES
@given(st.lists(_sound_record, min_size=1, max_size=4, unique_by=lambda record: str(record["id"])))
def test_sound_token_records_are_read_as_they_are(documents: list[dict[str, list[int]]]) -> None:
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from gemq.eval.records import read_records

    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        path.write_bytes(b"\n".join(map(dumped, documents)))
        read = read_records(path, tokenizer=None, vocab_size=512)
    wanted = [(str(d["id"]), [*d["context_token_ids"], *d["target_token_ids"]], d["target_token_ids"]) for d in documents]
    assert [(record.id, list(record.tokens), list(record.targets)) for record in read] == wanted


_header = st.fixed_dictionaries({"gemq_calibration": st.just(1) | _scalars, "sha256": _scalars, "description": _any}) | _any
_row = st.fixed_dictionaries({"token_ids": _ids}) | _any


@EXAMPLES
@given(_header, st.lists(_row, max_size=3))
def test_a_calibration_set_is_refused_in_a_sentence_or_has_its_digest(header: object, rows: list[object]) -> None:
    refusal(READERS["calibration-set"], b"\n".join(map(dumped, [header, *rows])))


_estimate = st.fixed_dictionaries({"value": _scalars, "standard_error": _scalars, "upper_95": _scalars}) | _any
_measurement = st.fixed_dictionaries({
    "kind": st.sampled_from(["ppl", "kl"]) | _any, "data": st.just("a") | _any, "data_sha256": st.just("ab" * 32) | _any,
    "dtype": st.just("x") | _any, "tokens": st.integers(0, 3) | _any, "records": st.integers(0, 3) | _any},
    optional={"ppl": _estimate, "kl_nats": _estimate}) | _any  # fmt: skip


@EXAMPLES
@given(st.fixed_dictionaries({"measurements": st.lists(_measurement, max_size=2) | _any, "version": st.just(1) | _any}) | _any)
def test_measurements_are_refused_in_a_sentence_or_sound(document: object) -> None:
    refusal(READERS["measured"], dumped(document))
