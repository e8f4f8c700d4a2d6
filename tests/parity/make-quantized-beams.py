#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/tiny-llama-quantized-beams.json: what generate(num_beams=...) of Transformers says of tests/data/tiny-llama-tied.gguf over
its quantised caches whose rows are coded apart (quanto axis 0, fp8).

    make-quantized-beams.py DATA_FOLDER     (a few minutes; versions as in make-quantized-oracle.py)

Float32, eager attention.  Kept are cases that do not change when every logit moves a little.  "model" names the cache.
"""

import importlib.util
import json
import os
import sys
import warnings

import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

spec = importlib.util.spec_from_file_location("quantized", os.path.join(os.path.dirname(os.path.abspath(__file__)), "make-quantized-oracle.py"))
quantized = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quantized)
transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore")

CACHES = {"quanto4": dict(backend="quanto", nbits=4, axis_key=0, axis_value=0, q_group_size=16, residual_length=4),
          "quanto2": dict(backend="quanto", nbits=2, axis_key=0, axis_value=0, q_group_size=32, residual_length=6),
          "fp8": dict(backend="fp8")}
NOISE = 2e-3


class Shake(LogitsProcessor):
    """Moves every score a little, the same way for the same step."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids, scores):
        return scores + (torch.rand(scores.shape, generator=self.generator) - 0.5) * 2 * NOISE


@torch.no_grad()
def run(model, case, shake=None):
    prompt = torch.tensor([case["prompt"]])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), num_beams=case["beams"], num_return_sequences=case["return"],
                         max_new_tokens=case["max_new"], do_sample=False, length_penalty=case["penalty"], early_stopping=False,
                         return_dict_in_generate=True, output_scores=True, cache_implementation="quantized",
                         cache_config=dict(CACHES[case["model"]]), logits_processor=LogitsProcessorList([Shake(shake)] if shake else []))
    n = len(case["prompt"])
    return {"sequences": [row[n:] for row in out.sequences.tolist()], "scores": [round(x, 6) for x in out.sequences_scores.tolist()],
            "moves": max(len(set(row)) for row in out.beam_indices.tolist())}


def main():
    torch.set_num_threads(1)
    folder = sys.argv[1]
    model, rng, result = quantized.load(folder), torch.Generator().manual_seed(8), []
    for name in CACHES:
        for beams in (2, 3, 5, 8):
            case = {"model": name, "beams": beams, "return": max(1, beams - 1), "early": "false", "penalty": 1.0, "ignore_eos": True,
                    "max_new": 18, "stop": []}
            for attempt in range(200):
                one = {**case, "prompt": torch.randint(0, 256, ((40, 9)[attempt % 2],), generator=rng).tolist()}
                out = run(model, one)
                # More than one source beam: the rows really moved.
                if out["moves"] > 1 and all(run(model, one, seed)["sequences"] == out["sequences"] for seed in (1, 2)):
                    result.append({**one, **out})
                    print(name, beams, "prompt", len(one["prompt"]), "sources", out["moves"], "attempt", attempt, flush=True)
                    break
    with open(os.path.join(folder, "tiny-llama-quantized-beams.json"), "w") as file:
        json.dump({"oracle": "Transformers 5.24.0, float32, eager attention, optimum-quanto 0.2.7", "eos": [], "cases": result}, file,
                  separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
