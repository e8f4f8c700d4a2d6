#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/tiny-llama-quantized.json: what Transformers says of tests/data/tiny-llama-tied.gguf with its quantised caches.

    make-quantized-oracle.py DATA_FOLDER     (a minute; needs torch 2.15, transformers 5.24.0, optimum-quanto 0.2.7, hqq 0.2.8 and gguf)

Float32, eager attention.  Per cache and prompt: greedy ids of a first turn, then a second turn of a few more tokens on the same cache and its
greedy ids; at some steps the logits at 64 columns and the margin between the two largest.
"""

import importlib.util
import json
import os
import sys

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import QuantizedCache

here = os.path.dirname(os.path.abspath(__file__))
spec = importlib.util.spec_from_file_location("tiny", os.path.join(here, "make-tiny-llama.py"))
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)

CACHES = [dict(backend="quanto", nbits=4, axis_key=0, axis_value=0, q_group_size=16, residual_length=4),
          dict(backend="quanto", nbits=2, axis_key=0, axis_value=0, q_group_size=32, residual_length=16),
          dict(backend="hqq", nbits=4, axis_key=1, axis_value=1, q_group_size=16, residual_length=4),
          dict(backend="hqq", nbits=8, axis_key=1, axis_value=1, q_group_size=32, residual_length=128),
          dict(backend="hqq", nbits=2, axis_key=0, axis_value=0, q_group_size=16, residual_length=8),
          dict(backend="fp8")]
N_FIRST, N_TURN, N_SECOND = 24, 9, 12
STEPS = (0, 1, 5, 11, 23)


def load(folder):
    model = tiny.make_model(True, 11)
    tensors = {t.name: t for t in GGUFReader(os.path.join(folder, "tiny-llama-tied.gguf")).tensors}
    for name, p in model.named_parameters():
        tensor = tensors[tiny.gguf_name(name) + ".weight"]
        values = dequantize(tensor.data, tensor.tensor_type).reshape(p.shape)
        heads = {"attn_q": tiny.HEADS, "attn_k": tiny.KV_HEADS}.get(tiny.gguf_name(name).split(".")[-1])
        if heads:
            values = values.reshape(heads, tiny.HEAD // 2, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        with torch.no_grad():
            p.copy_(torch.from_numpy(np.array(values, dtype=np.float32)))
    return model


def turn(model, cache, seen, ids, n, columns):
    """Feeds ids, then n greedy tokens; the last one is not fed."""
    said, records, feed = [], [], ids
    for step in range(n):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([feed]), cache_position=torch.arange(seen, seen + len(feed)), cache=cache,
                           use_cache=True).logits[0, -1]
        seen += len(feed)
        top = torch.topk(logits, 2)
        if step in STEPS:
            records.append({"step": step, "margin": float(top.values[0] - top.values[1]), "max": float(logits.abs().max()),
                            "columns": [round(float(logits[c]), 6) for c in columns]})
        said.append(int(top.indices[0]))
        feed = said[-1:]
    return seen, said, records


def main():
    torch.set_num_threads(1)
    folder = sys.argv[1]
    model = load(folder)
    columns = [i * (tiny.V - 1) // 63 for i in range(64)]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, n).tolist() for n in (33, 100)]
    turns = [rng.integers(0, 256, N_TURN).tolist() for _ in prompts]
    runs = []
    for options in CACHES:
        for prompt, second in zip(prompts, turns):
            cache = QuantizedCache(config=model.config, **options)
            seen, first_ids, first = turn(model, cache, 0, prompt, N_FIRST, columns)
            seen, second_ids, rest = turn(model, cache, seen, [first_ids[-1]] + second, N_SECOND, columns)
            runs.append({"cache": options, "prompt": prompt, "first": first_ids, "first_records": first, "turn": second, "second": second_ids,
                         "second_records": rest})
    with open(os.path.join(folder, "tiny-llama-quantized.json"), "w") as file:
        json.dump({"oracle": "Transformers 5.24.0, float32, eager attention, one thread", "columns": columns, "runs": runs}, file,
                  separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
