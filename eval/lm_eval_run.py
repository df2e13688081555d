"""Drives lm-eval against an endpoint: a local GSM8K file without any hub, or tasks by lm-eval's names.

lm-eval keeps every answer in a database beside the output, so that a stopped run asks only what is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from gemq import atomic, output
from gemq.calibration.tokenize import load_tokenizer
from gemq.errors import GemqError, IntegrityError, Interrupted, StoppedSafely, UsageError
from gemq.eval.accuracy import AccuracyResult, Domain, Graded, compared, domain_of, read_result
from gemq.eval.endpoint import Endpoint
from gemq.eval.records import file_sha256
from gemq.eval.target import Target
from gemq.http_client import headers, open_client
from gemq.quantize.content import directory_digest
from gemq.text_files import read_lines

GSM8K = "gsm8k"
KEY_FILE = "key.json"  # in the directory of kept answers: to which questions they are
EXAMPLES_FILE, QUESTIONS_FILE = "examples.jsonl", "questions.jsonl"
_ANSWERS = ".answers.db"  # and a label in front
KEPT_FILES = (KEY_FILE, EXAMPLES_FILE, QUESTIONS_FILE,
              *(f"{label}{_ANSWERS}{journal}" for label in ("target", "reference") for journal in ("", "-journal")))  # fmt: skip
"""Everything that `evaluate_accuracy` writes into that directory; SQLite's journal of a database may outlive a kill."""
SHOTS, ANSWER_TOKENS = 8, 512
_REQUESTS = ("generate_until", "loglikelihood", "loglikelihood_rolling")  # lm-eval's kinds of questions
ANSWER = r"#### (\-?[0-9\.\,]+)"  # GSM8K's own mark of the final number


@dataclass(frozen=True)
class Questions:
    """What is asked: a local GSM8K file (with its examples), or names of lm-eval's tasks."""

    data: Path | None = None
    tasks: tuple[str, ...] = ()
    shots: int = SHOTS
    shots_from: Path | None = None
    limit: int | None = None
    chat: bool = False

    def key(self) -> dict[str, Any]:
        """What makes two measurements comparable, as JSON types."""
        data, shots = (None if path is None else file_sha256(path) for path in (self.data, self.shots_from))
        return {"data_sha256": data, "tasks": list(self.tasks), "shots": self.shots, "shots_sha256": shots, "limit": self.limit,
                "chat": self.chat}  # fmt: skip


def require_lm_eval() -> None:
    """Raise UsageError unless lm-eval and what it needs to ask an endpoint are installed."""
    missing = [name for name in ("lm_eval", "aiohttp", "tenacity") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed", "pip install 'gemq[accuracy]'")


def read_gsm8k(path: Path) -> list[dict[str, str]]:
    """The questions of a .jsonl of {question, answer}; raises UsageError naming the line that is none."""
    found = []
    for number, line in read_lines(path):
        try:
            entry = json.loads(line)
            question, answer = entry["question"], entry["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} line {number} is no GSM8K question ({error!r})", "a line has question and answer") from None
        if not isinstance(question, str) or not isinstance(answer, str) or "#### " not in answer:
            raise UsageError(f"{path} line {number}: the answer doesn't end with #### and a number", "give GSM8K's .jsonl as it is published")
        found.append({"question": question, "answer": answer})
    return found


def gsm8k_task(questions: Questions, folder: Path) -> dict[str, Any]:
    """lm-eval's configuration of GSM8K from a local file: exact match of the number after ####, worked examples in front.

    The examples are the first of `shots_from`, or of the data itself, and those are not asked.
    """
    assert questions.data is not None
    asked = read_gsm8k(questions.data)
    examples = read_gsm8k(questions.shots_from)[: questions.shots] if questions.shots_from else asked[: questions.shots]
    if len(examples) < questions.shots:
        raise UsageError(f"--shots {questions.shots}: {questions.shots_from or questions.data} has {len(examples)} questions", "ask for fewer")
    asked = asked if questions.shots_from else asked[questions.shots :]
    if not asked:
        raise UsageError(f"{questions.data} holds no question beside its {questions.shots} examples", "give --shots-from, or fewer --shots")
    files = {"train": folder / EXAMPLES_FILE, "test": folder / QUESTIONS_FILE}
    for name, rows in (("train", examples or asked[:1]), ("test", asked)):
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "task": GSM8K, "dataset_path": "json", "dataset_kwargs": {"data_files": {name: str(path) for name, path in files.items()}},
        "output_type": "generate_until", "training_split": "train", "test_split": "test", "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"}, "num_fewshot": questions.shots,
        "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Question:"], "do_sample": False, "temperature": 0.0, "max_gen_toks": ANSWER_TOKENS},
        "filter_list": [{"name": "number", "filter": [{"function": "regex", "regex_pattern": ANSWER}, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True,
                         "ignore_punctuation": False, "regexes_to_ignore": [",", r"\$", r"(?s).*#### ", r"\.$"]}],
    }  # fmt: skip


@contextlib.contextmanager
def _quiet(*, offline: bool) -> Iterator[None]:
    """lm-eval and what it calls without their own logs and bars; without a hub where everything is local."""
    kept = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE", "OPENAI_API_KEY")}
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.pop("OPENAI_API_KEY", None)  # lm-eval would send it to whatever endpoint is asked
    if offline:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import datasets

    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        if not bars:
            datasets.enable_progress_bars()
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _model(endpoint: Endpoint, questions: Questions, in_flight: int, tokenizer: Path | None) -> Any:
    """lm-eval's client of the endpoint."""
    importlib.import_module("lm_eval.models")  # fills the registry
    get_model = importlib.import_module("lm_eval.api.registry").get_model
    kind, path = ("local-chat-completions", "chat/completions") if questions.chat else ("local-completions", "completions")
    arguments: dict[str, Any] = {
        "model": endpoint.model, "base_url": f"{endpoint.base_url}/{path}", "num_concurrent": max(2, in_flight), "max_retries": 3,
        "tokenized_requests": False, "timeout": 600, "max_length": endpoint.max_length or 8192, "eos_string": "<eos>",
        "max_gen_toks": ANSWER_TOKENS,
    }  # fmt: skip
    if tokenizer is not None and not questions.chat:
        load_tokenizer(tokenizer)  # lm-eval's own error for one that can't be read names no directory
        arguments |= {"tokenizer": str(tokenizer), "tokenizer_backend": "huggingface", "revision": None}
    else:
        arguments["tokenizer_backend"] = None
    if headers():
        arguments["header"] = headers()
    return get_model(kind)(**arguments)


def _with_progress(model: Any, label: str) -> None:
    """Let gemq's own bar follow the answers that lm-eval's client hands to its cache."""
    advance: list[Any] = []
    set_hook = model.set_cache_hook

    def set_counting(hook: Any) -> None:
        add = hook.add_partial

        def add_and_count(*arguments: Any) -> None:
            add(*arguments)
            if advance:
                advance[-1]()

        hook.add_partial = add_and_count
        set_hook(hook)

    model.set_cache_hook = set_counting
    for name in _REQUESTS:
        ask = getattr(model, name)

        def counted(requests: Sequence[Any], ask: Any = ask) -> Any:
            with output.progress(label, len(requests), "answers") as step:
                advance.append(step)
                try:
                    return ask(requests)
                finally:
                    advance.pop()

        setattr(model, name, counted)


def _check_kept(cached: Any, model: Any, name: str) -> None:
    """Let `cached`, a CachingLM around `model`, ask one question of kind `name` again whose answer it keeps, before it goes on from there."""
    module = importlib.import_module("lm_eval.api.model")
    answer = getattr(cached, name)

    def checked(requests: Sequence[Any]) -> Any:
        # lm-eval keeps no sampled answers
        known = (request for request in requests if not (name == "generate_until" and request.args[1].get("do_sample"))
                 and module.hash_args(name, request.args) in cached.dbdict)  # fmt: skip
        request = next(known, None)
        if request is not None:
            kept = cached.dbdict[module.hash_args(name, request.args)]
            model.set_cache_hook(module.CacheHook(None))  # what is kept stays as it is
            (now,) = getattr(model, name)([request])
            model.set_cache_hook(cached.get_cache_hook())
            if not same_answer(kept, now):
                raise IntegrityError(f"question {request.doc_id} is answered {_shown(now)} now, and {_shown(kept)} is kept in {cached.cache_db}: the "
                                     "server answers with another model, or does not decode greedily",
                                     "choose another --output, or delete what is kept, and measure one model from start to end")  # fmt: skip
        return answer(requests)

    setattr(cached, name, checked)


def same_answer(kept: Any, now: Any) -> bool:
    """Whether two answers are one model's: equal texts, or log-likelihoods that differ by no more than a server's rounding."""
    if isinstance(kept, str) or isinstance(now, str):
        return bool(kept == now)
    then, later = (float(value[0] if isinstance(value, (tuple, list)) else value) for value in (kept, now))
    return math.isclose(then, later, rel_tol=0.01, abs_tol=0.05)


def _shown(answer: Any) -> str:
    return repr(answer if len(repr(answer)) <= 60 else f"{str(answer)[:60]}…")


def ask(
    endpoint: Endpoint, questions: Questions, folder: Path, *, label: str, in_flight: int = 8, tokenizer: Path | None = None,
    check_kept: bool = True,
) -> list[Domain]:  # fmt: skip
    """Every task's graded questions, asked `in_flight` at a time; answers are kept in `folder` and not asked again.

    With `check_kept`, one kept question is asked again first: a server at a URL may serve another model now. Raises StoppedSafely where the endpoint
    dies, UsageError for tasks or files that can't be used, IntegrityError for what it answers.
    """
    require_lm_eval()
    with _quiet(offline=not questions.tasks):
        evaluate = importlib.import_module("lm_eval").evaluate
        manager = importlib.import_module("lm_eval.tasks").TaskManager
        caching = importlib.import_module("lm_eval.api.model").CachingLM
        spec: list[Any] = list(questions.tasks) if questions.tasks else [gsm8k_task(questions, folder)]
        try:
            loaded = manager(include_defaults=bool(questions.tasks)).load(spec)  # reading the names of all its tasks takes seconds
        except GemqError:
            raise
        except Exception as error:  # lm-eval, datasets and the hub's client raise whatever they like
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            raise UsageError(f"lm-eval can't load {', '.join(questions.tasks) or questions.data}: {reason}",
                             "lm-eval ls tasks lists the names; their data come from the Hub unless it is cached") from error  # fmt: skip
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=1234)
            if questions.tasks and task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
        model = _model(endpoint, questions, in_flight, tokenizer)
        _with_progress(model, label)
        cached = caching(model, str(folder / f"{label}{_ANSWERS}"))
        for name in _REQUESTS if check_kept else ():
            _check_kept(cached, model, name)
        try:
            graded = evaluate(lm=cached, task_dict=loaded, limit=questions.limit, bootstrap_iters=0, log_samples=True,
                                      apply_chat_template=questions.chat, verbosity="CRITICAL")  # fmt: skip
        except (GemqError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise _failure(endpoint, error) from error
        finally:
            cached.dbdict.close()
    return [_domain(name, samples) for name, samples in sorted(graded["samples"].items())]


def _failure(endpoint: Endpoint, error: Exception) -> GemqError:
    """What a failure of lm-eval's client means: the endpoint is gone, or it refuses."""
    status = getattr(error, "status", None)
    try:
        with open_client(endpoint.base_url, timeout=10) as client:
            alive = client.get("/models").status_code == 200
    except httpx.HTTPError:
        alive = False
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    if not alive or status is None or status >= 500:
        return StoppedSafely(f"{endpoint.name} stopped answering: {reason}", "see the server's log, start it again, and run the same command again")
    return UsageError(f"{endpoint.name} refused a question ({status}): {reason}",
                      "serve with a window that holds examples and answer, or give fewer --shots; --chat needs a chat template")  # fmt: skip


def _domain(name: str, samples: Sequence[dict[str, Any]]) -> Domain:
    """A task's grades: of the metric that lm-eval lists first, and of the first filter where it has several."""
    first = samples[0]
    metric = first["metrics"][0]
    own = [sample for sample in samples if sample["filter"] == first["filter"]]
    found = []
    for sample in own:
        grade = float(sample[metric])
        if not 0 <= grade <= 1:
            raise IntegrityError(f"{name}: {metric} of question {sample['doc_id']} is {grade}, no grade from 0 to 1",
                                 "choose tasks that are graded by accuracy or exact match")  # fmt: skip
        length = sum(len(text) for answers in sample["resps"] for text in answers if isinstance(text, str))
        found.append(Graded(int(sample["doc_id"]), str(sample["doc_hash"]), grade, length))
    return domain_of(name, metric, sorted(found, key=lambda question: question.id))


def evaluate_accuracy(
    target: Target, questions: Questions, *, reference: str | None = None, in_flight: int = 8, tokenizer: Path | None = None,
    python: Path | None = None, kept: Path | None = None,
) -> AccuracyResult:  # fmt: skip
    """The accuracy of `target` on `questions`, and its paired drop against `reference`: a URL, a directory, or an earlier result's .json.

    In the directory `kept`, which the caller holds (`atomic.resumable_directory`), answers survive a stop, and the same call goes on; writing
    the result and deleting the directory are the caller's. Raises UsageError, IntegrityError, StoppedSafely.
    """
    require_lm_eval()
    earlier = read_result(Path(reference)) if reference is not None and reference.endswith(".json") else None
    other = None if reference is None or earlier is not None else Target.parse(reference)
    key = questions.key()
    if earlier is not None and earlier[0] != key:
        raise UsageError(f"{reference} was measured on other questions", "measure both on the same file, with the same options")
    if questions.data is not None:
        read_gsm8k(questions.data)
    digest, their_digest = target.digest, earlier[2] if earlier is not None else None if other is None else other.digest
    reads = tokenizer or target.checkpoint
    sides = {"target": _identity(target, digest), "reference": reference and (their_digest if other is None else _identity(other, their_digest)),
             "tokenizer": None if reads is None else directory_digest(reads)}  # fmt: skip
    with _folder(kept, sides | key) as folder:
        def measure(side: Target, label: str) -> list[Domain]:
            with side.opened(python=python) as (endpoint, _):
                return ask(endpoint, questions, folder, label=label, in_flight=in_flight, tokenizer=tokenizer or side.checkpoint,
                           check_kept=(digest if side is target else their_digest) is None)  # fmt: skip

        try:
            ours = measure(target, "target")
            theirs = earlier[1] if earlier is not None else measure(other, "reference") if other is not None else None
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {_kept(kept)}", "run the same command again to go on") from None
        except StoppedSafely as error:
            raise type(error)(f"{error.message}; {_kept(kept)}", error.next_step) from error
    if theirs is None:
        return AccuracyResult(target.name, None, key, tuple(ours), target_digest=digest, reference_digest=their_digest)
    assert reference is not None
    return replace(compared(target.name, reference, key, ours, theirs), target_digest=digest, reference_digest=their_digest)


def _identity(side: Target, digest: str | None) -> str | list[str]:
    """What distinguishes a side from every other, as far as that can be known: its content digest, or a server's address and its model's name."""
    if digest is None and side.directory is None:
        endpoint = Endpoint.open(side.name)
        return [endpoint.base_url, endpoint.model]
    return digest or side.name


def _kept(folder: Path | None) -> str:
    return f"answers so far are kept in {folder}" if folder is not None else "nothing is kept without --output"


@contextlib.contextmanager
def _folder(kept: Path | None, key: dict[str, Any]) -> Iterator[Path]:
    """Where answers are kept: in `kept`, unless those to other questions are there, or in a temporary folder."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="gemq-accuracy-") as name:
            yield Path(name)
        return
    file, text = kept / KEY_FILE, json.dumps(key, sort_keys=True)
    if file.exists() and file.read_bytes() != text.encode():
        raise UsageError(f"{kept} holds answers to other questions, or of another model", "choose another --output, or delete that directory")
    atomic.write_file(file, text)
    yield kept
