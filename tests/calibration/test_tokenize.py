"""Documents become windows: BOS first and once, no document runs into another, nothing but short tails is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemq.calibration.chats import encode_messages
from gemq.calibration.tokenize import (
    SHORTEST_WINDOW,
    TokenLimits,
    check_ids,
    cut_windows,
    encode_text,
    load_tokenizer,
    read_limits,
)
from gemq.errors import UsageError

BOS, EOS = 2, 1
LIMITS = TokenLimits(vocab_size=100, max_length=64, bos=BOS, eos=EOS)
# each document's tokens are its own numbers, so that a window tells where it comes from
sizes = st.lists(st.integers(0, 120), max_size=8)
lengths = st.integers(2, 60)


def numbered(sizes: list[int]) -> list[list[int]]:
    return [[1000 * (place + 1) + at for at in range(size)] for place, size in enumerate(sizes)]


def windows_of(documents: list[list[int]], length: int, **options: Any) -> list[tuple[int, ...]]:
    return list(cut_windows(documents, length, bos=BOS, **options))


@given(sizes, lengths, st.booleans())
def test_every_window_starts_with_the_only_bos_and_is_no_longer_than_asked(sizes: list[int], length: int, pack: bool) -> None:
    for window in windows_of(numbered(sizes), length, eos=EOS, pack=pack):
        assert window[0] == BOS
        assert BOS not in window[1:]
        assert min(SHORTEST_WINDOW, length) <= len(window) <= length


@given(sizes, lengths)
def test_windows_never_straddle_documents(sizes: list[int], length: int) -> None:
    for window in windows_of(numbered(sizes), length):
        assert len({token // 1000 for token in window[1:]}) == 1


@given(sizes, lengths)
def test_no_token_is_lost_but_a_document_s_short_tail(sizes: list[int], length: int) -> None:
    documents = numbered(sizes)
    got = windows_of(documents, length)
    for place, document in enumerate(documents, 1):
        kept = [token for window in got for token in window[1:] if token // 1000 == place]
        lost = document[len(kept) :]
        assert kept + lost == document
        assert len(lost) + 1 < min(SHORTEST_WINDOW, length) or not lost


@given(sizes, lengths)
def test_packed_windows_are_one_stream_with_eos_after_each_document(sizes: list[int], length: int) -> None:
    documents = numbered(sizes)
    got = windows_of(documents, length, eos=EOS, pack=True)
    stream = [token for document in documents if document for token in (*document, EOS)]
    kept = [token for window in got for token in window[1:]]
    assert stream[: len(kept)] == kept
    assert all(len(window) == length for window in got[:-1])
    assert len(stream) - len(kept) + 1 < min(SHORTEST_WINDOW, length) or len(stream) == len(kept)


@given(sizes, lengths, st.booleans())
def test_documents_that_bring_their_bos_give_the_same_windows(sizes: list[int], length: int, pack: bool) -> None:
    documents = numbered(sizes)
    with_bos = [[BOS, *document] for document in documents]
    assert windows_of(with_bos, length, eos=EOS, pack=pack) == windows_of(documents, length, eos=EOS, pack=pack)


@given(sizes, lengths)
def test_a_bos_inside_a_record_starts_a_new_document(sizes: list[int], length: int) -> None:
    documents = numbered(sizes)
    packed_by_others = [[token for document in documents for token in (BOS, *document)]]
    assert windows_of(packed_by_others, length) == windows_of(documents, length)


def test_a_document_longer_than_the_length_gives_consecutive_windows() -> None:
    ids = list(range(10, 60))
    assert windows_of([ids], 20) == [(BOS, *ids[:19]), (BOS, *ids[19:38])]  # the last 12 and BOS are fewer than 16
    assert windows_of([ids], 18) == [(BOS, *ids[:17]), (BOS, *ids[17:34]), (BOS, *ids[34:])]


def test_an_eos_that_is_there_is_not_doubled_in_packing() -> None:
    assert windows_of([[10, EOS], [11] * 20], 24, eos=EOS, pack=True) == [(BOS, 10, EOS, *[11] * 20, EOS)]


def test_a_model_without_bos_gets_windows_without() -> None:
    assert list(cut_windows([list(range(20))], 20, bos=None)) == [tuple(range(20))]


def test_documents_are_taken_only_as_windows_are_asked_for() -> None:
    def endless():  # type: ignore[no-untyped-def]
        while True:
            yield [7] * 40

    windows = cut_windows(endless(), 41, bos=BOS)
    assert [len(next(windows)) for _ in range(3)] == [41, 41, 41]


def test_a_length_without_room_beside_bos_is_refused() -> None:
    with pytest.raises(UsageError, match="leaves no room"):
        windows_of([[5, 6]], 1)


@pytest.mark.parametrize("bad", [[3, -1], [3, 100], [3, 262144]])
def test_ids_outside_the_vocabulary_are_named(bad: list[int]) -> None:
    with pytest.raises(UsageError, match=rf"line 7: token 1 has id {bad[1]}, .*ids 0 to 99\)"):
        check_ids(bad, LIMITS, "line 7")


@pytest.mark.parametrize("bad", [[3, 1.0], [3, "4"], [3, True], [3, None], "34", {"a": 1}, None])
def test_only_whole_numbers_are_ids(bad: object) -> None:
    with pytest.raises(UsageError, match="line 7: "):
        check_ids(bad, LIMITS, "line 7")


def test_the_ids_at_both_ends_of_the_vocabulary_are_good() -> None:
    assert check_ids([0, 99], LIMITS, "line 1") == [0, 99]


def test_limits_of_a_multimodal_model_are_its_text_config_s(multimodal_model: Path) -> None:
    limits = read_limits(multimodal_model)
    assert (limits.vocab_size, limits.max_length, limits.bos, limits.eos) == (512, 4096, 2, 1)


def test_a_directory_without_config_or_vocabulary_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_limits(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 0}')
    with pytest.raises(UsageError, match="vocab_size 0"):
        read_limits(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="can't be read"):
        read_limits(tmp_path)


def test_a_missing_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokenizer that can be read"):
        load_tokenizer(tmp_path)


def test_text_gets_no_special_tokens(chat_model: Path) -> None:
    tokenizer = load_tokenizer(chat_model)
    ids = encode_text(tokenizer, "The river froze.", "here")
    assert ids
    assert BOS not in ids
    assert tokenizer.decode(ids) == "The river froze."


def test_a_chat_is_rendered_by_the_model_s_template_with_one_bos_in_its_window(chat_model: Path) -> None:
    tokenizer = load_tokenizer(chat_model)
    messages = [{"role": "user", "content": "Is the river frozen?"}, {"role": "assistant", "content": [{"type": "text", "text": "It is."}]}]
    ids = encode_messages(tokenizer, messages, "here")
    expected = ("<bos><start_of_turn>user\nIs the river frozen?<end_of_turn>\n<start_of_turn>model\nIt is.<end_of_turn>\n")
    assert tokenizer.decode(ids) == expected
    assert windows_of([ids], 200) == [tuple(ids)]


def test_a_chat_without_a_template_is_refused(base_model: Path) -> None:
    with pytest.raises(UsageError, match=r"line 3 holds chat messages, .* no chat template"):
        encode_messages(load_tokenizer(base_model), [{"role": "user", "content": "hello"}], "line 3")


@pytest.mark.parametrize("messages", [
    [], "hello", {"role": "user"}, [{"role": "user"}], [{"content": "x"}], ["x"], [{"role": 1, "content": "x"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image", "url": "x.png"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
])  # fmt: skip
def test_malformed_chats_are_refused_by_line(chat_model: Path, messages: object) -> None:
    with pytest.raises(UsageError, match="line 9: "):
        encode_messages(load_tokenizer(chat_model), messages, "line 9")


def test_what_the_template_refuses_is_said_by_line(chat_model: Path) -> None:
    tokenizer = load_tokenizer(chat_model)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match=r"line 2: the model's chat template refuses these messages .*roles must alternate"):
        encode_messages(tokenizer, [{"role": "user", "content": "x"}], "line 2")
