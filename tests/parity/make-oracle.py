#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/smollm2-oracle.json: what Transformers in float32 answers on the dequantised GGUF.

    make-oracle.py MODEL.gguf --json OUT.json              the fixture of test-model-oracle.c (about 10 minutes on one core)
    make-oracle.py MODEL.gguf --beams OUT.json             tests/data/smollm2-beams.json, beam searches, for test-engine.c (some minutes)
    make-oracle.py MODEL.gguf --ids IDS.txt --npy OUT.npy  teacher-forced logits of a list of ids, for tests/bench/quality.py
    make-oracle.py MODEL.gguf --tokenize TEXT --limit N    ids of a text, one line, for the two of them

Needs torch 2.15, transformers 5.24.0, accelerate, tokenizers and gguf from PyPI.  `make check` does not run it: the result is committed.
"""

import argparse
import json
import os

import numpy as np
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(HERE, "..", "data")
N_GREEDY = 256
TOP = 16
# Logits are recorded after these many greedy tokens, and at prompt positions spread evenly.
STEPS = (0, 1, 2, 3, 5, 8, 16, 31, 32, 63, 64, 127, 128, 200, 255)
N_PROMPT_POSITIONS = 8
TIE = 1e-3

CODE = '''#include <stdio.h>

/* Returns the greatest common divisor of a and b. */
static unsigned gcd(unsigned a, unsigned b)
{
    while (b != 0) {
        unsigned t = a % b;
        a = b;
        b = t;
    }
    return a;
}

/* Prints the fraction n/d in lowest terms. */
static void print_fraction(unsigned n, unsigned d)
{
'''
GERMAN = "Der Mühlgraben führt das Wasser vom Fluss zur Mühle. Im Sommer, wenn der Fluss wenig Wasser hat, "
CHINESE = "水渠把河里的水引到磨坊。夏天河水很少的时候,磨坊主人"
NUMBERS = "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584,"
CHAT = ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhy does the moon always show us the same side? Answer in three sentences.<|im_end|>\n"
        "<|im_start|>assistant\n")


def read_tokenizer(path):
    """The model's tokenizer from the tables of its GGUF, as its own tokenizer.json describes it: single digits, then byte level."""
    fields = GGUFReader(path).fields
    text = lambda name: [bytes(fields[name].parts[i]).decode() for i in fields[name].data]
    tokens = text("tokenizer.ggml.tokens")
    kinds = [int(fields["tokenizer.ggml.token_type"].parts[i][0]) for i in fields["tokenizer.ggml.token_type"].data]
    merges = [tuple(m.split(" ", 1)) for m in text("tokenizer.ggml.merges")]
    assert text("tokenizer.ggml.pre") == ["smollm"]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, k in zip(tokens, kinds) if k == 3])
    return tokenizer


def read_text(name):
    with open(os.path.join(DATA, name), encoding="utf-8") as file:
        return file.read()


def prompts(tokenizer):
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    long, medium = ids(read_text("text-alice.txt")), ids(read_text("text-mill.txt"))
    assert len(long) >= 3000 and len(medium) >= 700, (len(long), len(medium))
    return [
        ("chat", ids(CHAT)), ("code", ids(CODE)), ("german", ids(GERMAN)), ("chinese", ids(CHINESE)), ("numbers", ids(NUMBERS)),
        ("one token", ids("The")[:1]), ("700 tokens", medium[:700]), ("3000 tokens", long[:3000]),
    ]


def record(position, row, columns):
    """A compact account of one row of logits."""
    top = torch.topk(row, TOP)
    number = lambda x: float(f"{float(x):.7g}")
    return {
        "position": position,
        "top_ids": top.indices.tolist(),
        "top_values": [number(x) for x in top.values],
        "max_abs": number(row.abs().max()),
        "logsumexp": number(torch.logsumexp(row.double(), 0)),
        "columns": [number(row[c]) for c in columns],
    }


@torch.no_grad()
def run_prompt(model, name, ids, columns):
    """Greedy continuation with Transformers' own cache, and records of logits on the way."""
    out = model(torch.tensor([ids]), use_cache=True)
    spread = sorted({i * (len(ids) - 1) // N_PROMPT_POSITIONS for i in range(N_PROMPT_POSITIONS)} - {len(ids) - 1})
    records = [record(p, out.logits[0, p], columns) for p in spread]
    row, cache, generated, ties = out.logits[0, -1], out.past_key_values, [], []
    for step in range(N_GREEDY):
        if step in STEPS:
            records.append(record(len(ids) - 1 + step, row, columns))
        top = torch.topk(row, 2)
        if float(top.values[0] - top.values[1]) < TIE * float(row.abs().max()):
            ties.append({"step": step, "other": int(top.indices[1])})
        generated.append(int(top.indices[0]))
        out = model(torch.tensor([[generated[-1]]]), past_key_values=cache, use_cache=True)
        row, cache = out.logits[0, -1], out.past_key_values
    print(f"{name}: {len(ids)} ids, {len(records)} records, {len(ties)} ties", flush=True)
    return {"name": name, "prompt": ids, "greedy": generated, "ties": ties, "records": records}


@torch.no_grad()
def teacher_forced(model, ids, chunk=256):
    """float32 logits of every position, in chunks over a cache."""
    cache, rows = None, []
    for start in range(0, len(ids), chunk):
        out = model(torch.tensor([ids[start:start + chunk]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0].float().numpy())
    return np.concatenate(rows)


QUESTION = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
BEAM_CASES = [
    # name, text, beams, returned, new tokens, early_stopping, length_penalty, ignore end tokens, repetition penalty, n-gram
    ("chat", CHAT, 4, 4, 12, False, 1.0, False, 1.0, 0),
    ("short answer", QUESTION.format("What is the capital of France? Answer with one word."), 3, 2, 12, True, 1.0, False, 1.0, 0),
    ("number", QUESTION.format("How much is two and two?"), 5, 5, 14, False, 0.6, False, 1.0, 0),
    ("german", GERMAN, 5, 2, 12, "never", 0.5, True, 1.0, 0),
    ("penalties", NUMBERS, 3, 3, 16, False, 1.0, True, 1.2, 3),
]
BEAM_NOISE = 2e-3


class Shake:
    """Moves every score a little: a search that then ends elsewhere would test rounding."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids, scores):
        return scores + (torch.rand(scores.shape, generator=self.generator) - 0.5) * 2 * BEAM_NOISE


@torch.no_grad()
def run_beams(model, ids, case, shake=None):
    name, _, beams, n_return, max_new, early, penalty, ignore_eos, repetition, ngram = case
    model.generation_config.eos_token_id = None if ignore_eos else [0, 2]
    model.generation_config.pad_token_id = 0
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), num_beams=beams, num_return_sequences=n_return, max_new_tokens=max_new,
                         do_sample=False, early_stopping=early, length_penalty=penalty, repetition_penalty=repetition, no_repeat_ngram_size=ngram,
                         return_dict_in_generate=True, output_scores=True, logits_processor=[Shake(shake)] if shake else [])
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    return {"name": name, "prompt": ids, "beams": beams, "early": str(early).lower(), "penalty": penalty, "ignore_eos": ignore_eos,
            "repetition": repetition, "ngram": ngram, "max_new": max_new, "scores": [round(float(x), 6) for x in out.sequences_scores],
            "sequences": [row[len(ids):len(ids) + n] for row, n in zip(out.sequences.tolist(), lengths)]}


def beam_cases(model, tokenizer):
    for case in BEAM_CASES:
        ids = tokenizer.encode(case[1], add_special_tokens=False).ids
        result = run_beams(model, ids, case)
        stable = all(run_beams(model, ids, case, seed)["sequences"] == result["sequences"] for seed in (1, 2))
        print(case[0], len(ids), "stable" if stable else "LEFT OUT: a close decision", [tokenizer.decode(s) for s in result["sequences"]], flush=True)
        if stable:
            yield result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--json")
    parser.add_argument("--beams")
    parser.add_argument("--ids")
    parser.add_argument("--npy")
    parser.add_argument("--tokenize")
    parser.add_argument("--limit", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.tokenize:
        with open(args.tokenize, encoding="utf-8") as file:
            print(*read_tokenizer(args.model).encode(file.read(), add_special_tokens=False).ids[:args.limit])
        return
    folder, name = os.path.split(os.path.abspath(args.model))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager").eval()
    if args.npy:
        with open(args.ids) as file:
            np.save(args.npy, teacher_forced(model, [int(x) for x in file.read().split()]))
    if args.beams:
        with open(args.beams, "w") as file:
            json.dump({"oracle": "Transformers 5.24.0, float32, eager attention", "eos": [0, 2],
                       "cases": list(beam_cases(model, read_tokenizer(args.model)))}, file, separators=(",", ":"))
            file.write("\n")
    if args.json:
        tokenizer = read_tokenizer(args.model)
        n_vocab = model.config.vocab_size
        columns = [i * (n_vocab - 1) // 63 for i in range(64)]
        result = {
            "model": "SmolLM2-135M-Instruct Q4_1", "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "oracle": "Transformers 5.24.0, float32, eager attention", "tie": TIE, "columns": columns,
            "prompts": [run_prompt(model, name, ids, columns) for name, ids in prompts(tokenizer)],
        }
        with open(args.json, "w") as file:
            json.dump(result, file, separators=(",", ":"))
            file.write("\n")


if __name__ == "__main__":
    main()
