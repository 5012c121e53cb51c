# SPDX-License-Identifier: Apache-2.0
"""Decode in this process with `LLM(..., kv_transfer_config=...)`.

How the engine is made is the argument. What it decodes is read when it is there. All is JSON.
"""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main() -> None:
    setting = json.loads(sys.argv[1])
    llm = LLM(
        **setting["settings"],
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**setting["kv_transfer_config"]),
    )
    task = json.load(sys.stdin)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=task["max_tokens"],
        ignore_eos=True,
        logprobs=2,
        extra_args={"kv_transfer_params": task["params"]},
    )
    [answer] = llm.generate([{"prompt_token_ids": task["prompt"]}], sampling)
    out = answer.outputs[0]
    logprobs = [
        rows[token].logprob for token, rows in zip(out.token_ids, out.logprobs, strict=True)
    ]
    likeliest = [[(token, one.logprob) for token, one in rows.items()] for rows in out.logprobs]
    received = [
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:omni_connector_handoffs_received"
    ]
    result = {
        "tokens": list(out.token_ids),
        "logprobs": logprobs,
        "likeliest": likeliest,
        "received": received,
    }
    print("\nRESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
