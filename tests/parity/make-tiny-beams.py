#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/tiny-llama-beams.json: what generate(num_beams=...) of Transformers in float32 says of the models of make-tiny-llama.py.

    make-tiny-beams.py OUT.json     (some minutes; versions as in make-oracle.py)

Kept are cases that do not change when every logit moves a little: closer decisions would test rounding, not the search.  End tokens are the
two that the daemon's tokenizer knows as such; in the cases with "ignore_eos" there are none.
"""

import importlib.util
import json
import os
import sys
import warnings

import torch
import transformers
from gguf import GGMLQuantizationType as Q
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

spec = importlib.util.spec_from_file_location("tiny", os.path.join(os.path.dirname(os.path.abspath(__file__)), "make-tiny-llama.py"))
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore")
NOISE = 1e-4


class Writer:
    """Takes what a GGUF would take, keeps the tokens."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: setattr(self, "tokens", args[0]) if name == "add_token_list" else None


def token_texts():
    """What each id says, as bytes: the letters of GPT-2's table, nothing for control tokens."""
    writer = Writer()
    tiny.add_tokenizer(writer)
    letters, extra = {}, 0
    for b in range(256):
        if 33 <= b < 127 or 161 <= b < 173 or 174 <= b < 256:
            letters[chr(b)] = b
        else:
            letters[chr(256 + extra)] = b
            extra += 1
    eos = sorted(writer.tokens.index(t) for t in ("<|im_end|>", "<|endoftext|>"))
    return eos, [b"" if t.startswith("<|") or t.startswith("<unused") else bytes(letters[c] for c in t) for t in writer.tokens]


EOS, TEXTS = token_texts()


class Stop(StoppingCriteria):
    """A stop string ends within the text of the last token; it may begin in earlier ones of the answer."""

    def __init__(self, stops, n_prompt):
        self.stops, self.n_prompt = [s.encode() for s in stops], n_prompt

    def __call__(self, input_ids, scores, **kwargs):
        def stops(ids):
            text = b"".join(TEXTS[i] for i in ids)
            before = len(text) - len(TEXTS[ids[-1]])
            return any(text[:end].endswith(s) for s in self.stops for end in range(before + 1, len(text) + 1))
        return torch.tensor([stops(row[self.n_prompt:]) for row in input_ids.tolist()])


class Shake(LogitsProcessor):
    """Moves every score a little, the same way for the same step."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids, scores):
        return scores + (torch.rand(scores.shape, generator=self.generator) - 0.5) * 2 * NOISE


def load(name):
    tied, types, seed = {"tied": (True, {}, 11), "mixed": (False, tiny.MIXED, 12)}[name]
    model = tiny.make_model(tied, seed)
    tiny.add_tensors(Writer(), model, types)
    return model


@torch.no_grad()
def run(model, case, shake=None):
    prompt = torch.tensor([case["prompt"]])
    eos = None if case["ignore_eos"] else EOS
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = 0
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), num_beams=case["beams"], num_return_sequences=case["return"],
                         max_new_tokens=case["max_new"], do_sample=False, length_penalty=case["penalty"],
                         early_stopping={"false": False, "true": True, "never": "never"}[case["early"]], return_dict_in_generate=True,
                         output_scores=True, logits_processor=LogitsProcessorList([Shake(shake)] if shake else []),
                         stopping_criteria=StoppingCriteriaList([Stop(case["stop"], prompt.shape[1])] if case["stop"] else []))
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    scores = [round(x, 6) for x in out.sequences_scores.tolist()]
    n = len(case["prompt"])
    sequences = [row[n:n + k] for row, k in zip(out.sequences.tolist(), lengths)]
    return {"sequences": sequences, "scores": scores,
            "moves": max(len(set(row[:k])) for row, k in zip(out.beam_indices.tolist(), lengths))}


def wanted():
    for name in ("tied", "mixed"):
        for beams in range(2, 9):
            for early in ("false", "true", "never"):
                yield {"model": name, "beams": beams, "return": max(1, beams - beams % 3), "early": early,
                       "penalty": (1.0, 0.0, 2.0, -0.5)[beams % 4], "ignore_eos": beams % 4 == 3, "max_new": (4, 12, 20)[beams % 3], "stop": []}
    yield {"model": "tied", "beams": 40, "return": 20, "early": "false", "penalty": 1.0, "ignore_eos": True, "max_new": 16, "stop": []}
    yield {"model": "mixed", "beams": 20, "return": 20, "early": "never", "penalty": 1.0, "ignore_eos": False, "max_new": 10, "stop": []}
    for name, beams, early, stop in (("tied", 3, "false", "aeiou"), ("tied", 5, "true", "bcdfgh0123"), ("mixed", 4, "never", "xyzXYZ()!?"),
                                     ("mixed", 6, "false", "th")):
        stops = [stop] if stop == "th" else list(stop)
        yield {"model": name, "beams": beams, "return": beams, "early": early, "penalty": 1.0, "ignore_eos": False, "max_new": 14,
               "stop": stops + [" the", "ow "]}


def main():
    models, result, rng = {name: load(name) for name in ("tied", "mixed")}, [], torch.Generator().manual_seed(3)
    for case in wanted():
        best = None
        for attempt in range(400):
            n = (33, 3, 70)[attempt % 3]
            one = {**case, "prompt": torch.randint(0, 256, (n,), generator=rng).tolist()}
            out = run(models[case["model"]], one)
            if any(run(models[case["model"]], one, seed)["sequences"] != out["sequences"] for seed in (1, 2)):
                continue
            best = {**one, **out}
            # Worth keeping at once when an end token took part.
            stopped = sum(len(s) < case["max_new"] and s[-1] not in EOS for s in out["sequences"])
            if (case["stop"] and stopped) or (not case["stop"] and (case["ignore_eos"] or attempt > 5 or any(s[-1] in EOS for s in out["sequences"]))):
                break
        assert best, case
        ended = sum(s[-1] in EOS for s in best["sequences"])
        print(case["model"], case["beams"], case["early"], "prompt", len(best["prompt"]), "ended", ended, "stopped", stopped, "sources", best["moves"], flush=True)
        result.append(best)
    with open(sys.argv[1], "w") as file:
        json.dump({"oracle": "Transformers 5.24.0, float32, eager attention", "eos": EOS, "cases": result}, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
