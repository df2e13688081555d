"""Drives loads with vLLM's own benchmark client, in vLLM's Python: it imports nothing of gemq's.

Lines of JSON come in on standard input, a load each; lines go out on standard output: {"kind": "ready"}, then one a request as it is finished, and
{"kind": "end"} after a load. vLLM sends, reads and times as it always does; beside it the bytes of each answer are kept with the second of the
performance counter that they came at, so that gemq counts tokens from ids and checks what came, as with its own client.
"""

# mypy: ignore-errors

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time


class Kept:
    """A session, a response and its content in one: what vLLM's request function uses of them, with the pieces of the answer kept."""

    def __init__(self, session):
        self._session = session
        self.content = self
        self.status, self.reason, self.pieces = 0, "", []

    @contextlib.asynccontextmanager
    async def post(self, **request):
        """The session's post."""
        async with self._session.post(**request) as response:
            self._response, self.status, self.reason = response, response.status, response.reason
            if response.status != 200:  # the client does not read a refusal
                self.pieces.append((time.perf_counter(), await response.read()))
            yield self

    async def iter_any(self):
        """The content's pieces."""
        async for piece in self._response.content.iter_any():
            self.pieces.append((time.perf_counter(), piece))
            yield piece


def keeping(function, tell):
    """vLLM's request function, which also hands `tell` the input, the output and what was kept."""

    async def request(request_func_input, session, pbar=None):
        kept = Kept(session)
        started = time.perf_counter()
        output = await function(request_func_input=request_func_input, session=kept, pbar=pbar)
        tell(request_func_input, output, kept, started)
        return output

    return request


async def drive(serve, sample, job, tell):
    """Send a load's warm-ups, which nobody is told of, then its prompts."""
    if job["direct"]:  # a proxy can't reach this machine's loopback, and vLLM's client asks the one that the environment names
        for name in [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]:
            del os.environ[name]
    backend = "openai-chat" if job["chat"] else "openai"
    stock = serve.ASYNC_REQUEST_FUNCS[backend]
    for prompts, teller in ((job["warmups"], None), (job["prompts"], tell)):
        if not prompts:
            continue
        serve.ASYNC_REQUEST_FUNCS["gemq"] = stock if teller is None else keeping(stock, teller)
        requests = [
            sample(prompt=prompt["text"] or prompt["tokens"], prompt_len=len(prompt["tokens"] or ()), expected_output_len=job["output_tokens"],
                   request_id=str(prompt["index"]), chat_messages=[{"role": "user", "content": prompt["text"]}] if job["chat"] else None)
            for prompt in prompts
        ]  # fmt: skip
        await serve.benchmark(
            task_type=serve.TaskType.GENERATION, endpoint_type="gemq", api_url=job["api_url"], base_url=job["base_url"], model_id=job["model"],
            model_name=job["model"], tokenizer=None, input_requests=requests, logprobs=None, request_rate=float("inf"), burstiness=1.0,
            disable_tqdm=True, num_warmups=0, profile=False, selected_percentile_metrics=[], selected_percentiles=[99.0], ignore_eos=True,
            goodput_config_dict={}, max_concurrency=job["in_flight"], lora_modules=None, extra_headers=None, extra_body=job["extra_body"],
            ready_check_timeout_sec=0,
        )  # fmt: skip


def main():
    """Drive loads until standard input ends."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints is no line of ours

    def say(**line):
        lines.write(json.dumps(line) + "\n")
        lines.flush()

    from vllm.benchmarks import serve
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.version import __version__

    fields = {field.name for field in dataclasses.fields(SampleRequest)}

    def sample(**values):
        return SampleRequest(**{name: value for name, value in values.items() if name in fields})

    job = 0

    def tell(asked, output, kept, started):
        say(kind="request", job=job, index=int(asked.request_id), started=output.start_time or started, latency=output.latency, status=kept.status,
            success=output.success, error=output.error[-2000:], counted=output.output_tokens,
            pieces=[(second, piece.decode("utf-8", "replace")) for second, piece in kept.pieces])  # fmt: skip

    say(kind="ready", version=__version__)
    for job, line in enumerate(sys.stdin, 1):
        try:
            asyncio.run(drive(serve, sample, json.loads(line), tell))
        except Exception as error:
            say(kind="failed", job=job, error=f"{type(error).__name__}: {error}")
        else:
            say(kind="end", job=job)


if __name__ == "__main__":
    main()
