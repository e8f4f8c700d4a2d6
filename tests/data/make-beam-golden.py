#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/beam-golden.json: what generate(num_beams=...) and the score processors of Transformers say on random tables.

    make-beam-golden.py OUT.json     (under a minute; needs torch and transformers 5.24.0)

A "model" is a table: the logits of the next token depend on the last one only.  `make check` does not run this: the result is committed.
"""

import json
import sys
import warnings

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (MinPLogitsWarper, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor,
                                                    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore")
assert transformers.__version__ == "5.24.0"
SIZES = (6, 9, 16, 24)
# Decisions closer than this would test rounding, not rules: cases that change when every score moves by up to it are left out.
NOISE = 2e-5


class Shake(LogitsProcessor):
    """Moves every score a little, in each step and beam otherwise."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids, scores):
        return scores + (torch.rand(scores.shape, generator=self.generator) - 0.5) * 2 * NOISE


def table(size, seed):
    g = torch.Generator().manual_seed(seed)
    return [[round(float(x), 4) for x in row] for row in torch.randn(size, size, generator=g) * 1.5]


def make_model(logits, eos):
    size = len(logits)
    config = LlamaConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, vocab_size=size,
                         intermediate_size=16, eos_token_id=eos or None, pad_token_id=0, bos_token_id=1)
    model = LlamaForCausalLM(config).eval()
    forward, rows = model.forward, torch.tensor(logits, dtype=torch.float32)

    def table_forward(*args, **kwargs):
        out = forward(*args, **kwargs)
        ids = kwargs.get("input_ids", args[0] if args else None)
        out.logits = rows[ids][:, -1:, :]
        return out
    model.forward = table_forward
    model.generation_config.eos_token_id = eos or None
    return model


def run(logits, case, shake=None):
    model, trace = make_model(logits, case["eos"]), []
    cache = DynamicCache(config=model.config)
    reorder = cache.reorder_cache

    def recorded(rows):
        trace.append(rows.tolist())
        return reorder(rows)
    cache.reorder_cache = recorded
    options = {}
    if case["bad_words"]:
        options["bad_words_ids"] = case["bad_words"]
    if case["min_new"]:
        options["min_new_tokens"] = case["min_new"]
    if case["ngram"]:
        options["no_repeat_ngram_size"] = case["ngram"]
    if case["repetition"] != 1:
        options["repetition_penalty"] = case["repetition"]
    if shake:
        options["logits_processor"] = LogitsProcessorList([Shake(shake)])
    prompt = torch.tensor([case["prompt"]])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), cache=cache, num_beams=case["beams"],
                         num_return_sequences=case["beams"], max_new_tokens=case["max_new"], do_sample=False,
                         early_stopping={"false": False, "true": True, "never": "never"}[case["early"]],
                         length_penalty=case["penalty"], return_dict_in_generate=True, output_scores=True, **options)
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    n = len(case["prompt"])
    sequences = [row[n:n + k] for row, k in zip(out.sequences.tolist(), lengths)]
    beams = [row[:k] for row, k in zip(out.beam_indices.tolist(), lengths)]
    return {"sequences": sequences, "trails": beams, "scores": [round(x, 7) for x in out.sequences_scores.tolist()], "sources": trace}


def draw_case(rng, size):
    pick = lambda values: values[int(torch.randint(len(values), (1,), generator=rng))]
    ids = torch.randperm(size, generator=rng).tolist()
    n_eos = pick([0, 1, 1, 2, 3])
    beams = pick([2, 2, 3, 4, 5, 8])
    case = {"beams": min(beams, size - n_eos - 1), "max_new": pick([1, 2, 5, 9, 14]), "eos": ids[:n_eos], "early": pick(["false", "true", "never"]),
            "penalty": pick([1.0, 1.0, 0.0, 2.0, -1.0, 0.6]), "repetition": 1.0, "ngram": 0, "min_new": 0, "bad_words": [],
            "prompt": [pick(ids[n_eos:]) for _ in range(pick([1, 1, 2, 5]))]}
    if pick([0, 0, 1]):
        case["repetition"] = pick([1.3, 0.8])
    if pick([0, 0, 1]):
        case["ngram"] = pick([2, 3])
    if pick([0, 0, 1]):
        case["min_new"] = pick([2, 4])
    if pick([0, 0, 1]):
        case["bad_words"] = [[ids[-1]], [ids[-2], ids[-3]]] + ([[case["eos"][0]]] if case["eos"] else [])
    return case


def cases(tables):
    result = []
    rng = torch.Generator().manual_seed(11)
    while len(result) < 90:
        index = len(result) % len(tables)
        case = draw_case(rng, len(tables[index]))
        out = run(tables[index], case)
        if any(score < -1e6 for score in out["scores"]):
            continue  # fewer continuations than beams: what is then picked is arbitrary
        stable = True
        for seed in (1, 2, 3):
            moved = run(tables[index], case, seed)
            stable &= moved["sequences"] == out["sequences"] and moved["trails"] == out["trails"] and moved["sources"][:-1] == out["sources"][:-1]
        if stable:
            result.append({"table": index, **case, **out})
    return result


def processed():
    """Scores before and after: chains as generate() builds them, with and without beams' least number of tokens."""
    result = []
    g = torch.Generator().manual_seed(5)
    for temperature, k, p, m, keep in ((1.0, 5, 1.0, 0.0, 1), (0.7, 0, 0.8, 0.0, 1), (1.5, 12, 0.9, 0.05, 1), (1.0, 1, 1.0, 0.0, 3), (1.0, 0, 0.01, 0.0, 2),
                                       (1.0, 0, 1.0, 0.5, 4), (0.3, 20, 0.5, 0.2, 3), (2.0, 50, 0.95, 0.02, 2)):
        scores = torch.log_softmax(torch.randn(1, 40, generator=g) * 2, -1)
        ids = torch.randint(0, 40, (1, 12), generator=g)
        out = RepetitionPenaltyLogitsProcessor(1.4)(ids, scores.clone())
        out = NoRepeatNGramLogitsProcessor(2)(ids, out)
        if temperature != 1.0:
            out = TemperatureLogitsWarper(temperature)(ids, out)
        if k:
            out = TopKLogitsWarper(k, min_tokens_to_keep=keep)(ids, out)
        if p < 1.0:
            out = TopPLogitsWarper(p, min_tokens_to_keep=keep)(ids, out)
        if m:
            out = MinPLogitsWarper(m, min_tokens_to_keep=keep)(ids, out)
        number = lambda x: None if x == float("-inf") else round(x, 7)
        result.append({"temperature": temperature, "top_k": k, "top_p": p, "min_p": m, "keep": keep, "repetition": 1.4, "ngram": 2,
                       "history": ids[0].tolist(), "before": [round(x, 7) for x in scores[0].tolist()], "after": [number(x) for x in out[0].tolist()]})
    return result


def main():
    tables = [table(size, 100 + i) for i, size in enumerate(SIZES)]
    with open(sys.argv[1], "w") as file:
        json.dump({"oracle": f"Transformers {transformers.__version__}", "tables": tables, "cases": cases(tables), "processors": processed()}, file,
                  separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
