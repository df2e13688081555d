"""gemq's measurements against the real vLLM: one start with the small Gemma 4, a benchmark of three kinds of requests and a greedy capture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemq.eval.bench import arena_summary, run_bench
from gemq.eval.decoded import read_decoded
from gemq.eval.endpoint import Endpoint
from gemq.eval.greedy_run import Job, evaluate_greedy
from gemq.eval.records import Record
from gemq.eval.served_kl import served_kl, top_distributions
from gemq.eval.workloads import Load, Workload, prompts_for
from gemq.serve.server import serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
LOADS = (Load(name="chat", requests=3, output_tokens=12, chat=True, warmups=1),
         Load(name="ids", requests=4, output_tokens=12, input_tokens=40, in_flight=2, warmups=1),
         Load(name="streamed", requests=4, output_tokens=12, input_tokens=40, in_flight=2, streamed=True, warmups=1))  # fmt: skip


def test_a_real_server(vllm_python: Path, small_gemma4: Path, tmp_path: Path) -> None:
    environment = {"MAX_MODEL_LEN": "1024", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
    with serving(small_gemma4, python=vllm_python, verify=False, environment=environment) as server:
        endpoint = Endpoint.open(server.url)
        prompts = {load.name: prompts_for(load, None, vocabulary=500, bos=2) for load in LOADS}
        result, _ = run_bench(endpoint, Workload(name="small", loads=LOADS), prompts, target="small")
        # the numbers of a request that was answered are there, and the endpoint is found honest
        for one in result.loads:
            run = one.runs[0]
            assert run.output_tokens == 12 * len(prompts[one.load.name])
            assert run.tps == pytest.approx(run.output_tokens / run.duration_s)
            assert one.first_token_ms is not None
            assert one.between_tokens_ms is not None
            assert 0 < one.first_token_ms.mean < 60_000
            assert len(one.audit) == 3
        assert not result.broken
        assert arena_summary(result, result.loads[0], "job")["completed"] == 3
        # captured twice, one prompt at a time: the same ids, and records that another command can read
        sent = tmp_path / "prompts.jsonl"
        sent.write_text("".join(json.dumps({"id": p.id, "prompt_token_ids": list(p.tokens or ())}) + "\n" for p in prompts["ids"]))
        job = Job(server.url, server.url, prompts=sent, tokens=12, output_dir=tmp_path / "greedy")
        greedy = evaluate_greedy(job)
        assert greedy.identical_share == 1.0
        assert len(read_decoded(tmp_path / "greedy" / "decode.jsonl")) == 4
        records = [Record(p.id, p.tokens or (), 1, p.id) for p in prompts["ids"]]
        scored = top_distributions(endpoint, records, "scoring")
        assert all(len(position) >= 20 for record in scored for position in record)
        assert served_kl(scored, scored).value == pytest.approx(0.0, abs=1e-9)
