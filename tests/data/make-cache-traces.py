#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes cache-traces.txt: what the cache layers and masks of Transformers 5.24 do, operation by operation.

    make-cache-traces.py > cache-traces.txt     (seconds; needs torch and transformers 5.24)

Token number t (from 1) that a layer of a case gets has the value 1000 * row + t, and minus that in V.  Lines:

    case NAME
    layer KIND [window W] [max M] [kernel K]     dynamic static sliding static_sliding conv hybrid dummy
    rows B
    record
    update LAYER Q => mask LENGTH OFFSET ret VALUES... kept VALUES... len L
    conv LAYER Q => ret VALUES... kept VALUES...
    state LAYER => value V                       one recurrent state, the t-th has the value 1000 * row + t
    crop N => [error]
    reorder ROWS... / repeat N / select ROWS...
    reset
    lengths => L...                              per layer, -2 when asking is an error
    whole => croppable C compileable C max M

    mask KIND W pads P... q Q len L => ROW...    each query of each row in turn, a character per key

Left out is what we do otherwise on purpose (CACHE-SEMANTICS "Ours"): windows of 1, crops beyond what is held, padding of short
convolution states after a crop, recurrent states after a crop and whether there can be one.
"""

import random
import sys
import warnings

import torch

warnings.simplefilter("ignore")
import transformers
import transformers.cache_utils as C
from transformers import LlamaConfig, Llama4TextConfig, MistralConfig
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


def make_layer(kind, window=0, maximum=0):
    return {
        "dynamic": lambda: C.DynamicLayer(),
        "static": lambda: C.StaticLayer(max_cache_len=maximum),
        "sliding": lambda: C.DynamicSlidingWindowLayer(window),
        "static_sliding": lambda: C.StaticSlidingWindowLayer(max_cache_len=maximum, sliding_window=window),
        "conv": lambda: C.LinearAttentionLayer(),
        "hybrid": lambda: C.LinearAttentionAndFullAttentionLayer(),
        "dummy": lambda: C.DummyLayer(),
    }[kind]()


def numbers(x):
    return " ".join(str(int(v)) for v in x.flatten().tolist())


class Case:
    def __init__(self, name, layers, rows=1):
        self.out = [f"case {name}"]
        for kind, window, maximum, kernel in layers:
            self.out.append("layer " + kind + (f" window {window}" if window else "") + (f" max {maximum}" if maximum else "") +
                            (f" kernel {kernel}" if kernel else ""))
        self.out.append(f"rows {rows}")
        self.spec = layers
        self.cache = C.Cache(layers=[make_layer(k, w, m) for k, w, m, _ in layers])
        self.rows = rows
        self.fed = [0] * len(layers)
        self.convs = [0] * len(layers)
        self.states = [0] * len(layers)

    def values(self, counter, layer, q):
        first = counter[layer] + 1
        counter[layer] += q
        return torch.tensor([[1000 * b + first + t for t in range(q)] for b in range(self.rows)], dtype=torch.float32)

    def record(self):
        self.cache.activate_past_recording()
        self.out.append("record")

    def update(self, layer, q):
        length, offset = self.cache.get_mask_sizes(q, layer)
        x = self.values(self.fed, layer, q).view(self.rows, 1, q, 1)
        k, v = self.cache.update(x, -x, layer)
        assert torch.equal(k, -v)
        stored = self.cache.layers[layer]
        assert torch.equal(stored.keys, -stored.values)
        seen = int(self.cache.layers[layer].get_seq_length())
        self.out.append(f"update {layer} {q} => mask {length} {offset} ret {numbers(k)} kept {numbers(stored.keys)} len {seen}")

    def conv(self, layer, q):
        x = self.values(self.convs, layer, q).view(self.rows, 1, q)
        r = self.cache.update_conv_state(x, layer, conv_kernel_size=self.spec[layer][3] or None)
        self.out.append(f"conv {layer} {q} => ret {numbers(r)} kept {numbers(self.cache.layers[layer].conv_states[0])}")

    def state(self, layer):
        x = self.values(self.states, layer, 1)
        r = self.cache.update_recurrent_state(x, layer)
        self.out.append(f"state {layer} => value {numbers(r)}")

    def crop(self, n):
        try:
            self.cache.crop(n)
            self.out.append(f"crop {n} =>")
        except Exception:
            self.out.append(f"crop {n} => error")

    def reorder(self, rows):
        self.cache.reorder_cache(torch.tensor(rows))
        self.out.append("reorder " + " ".join(map(str, rows)))

    def repeat(self, n):
        self.cache.batch_repeat_interleave(n)
        self.rows *= n
        self.out.append(f"repeat {n}")

    def select(self, rows):
        self.cache.batch_select_indices(torch.tensor(rows))
        self.rows = len(rows)
        self.out.append("select " + " ".join(map(str, rows)))

    def reset(self):
        self.cache.reset()
        self.out.append("reset")

    def lengths(self):
        found = []
        for i in range(len(self.spec)):
            try:
                found.append(int(self.cache.get_seq_length(i)))
            except ValueError:
                found.append(-2)
        self.out.append("lengths => " + " ".join(map(str, found)))

    def whole(self):
        def ask(f):
            try:
                return int(f())
            except Exception:
                return -2
        self.out.append(f"whole => croppable {ask(lambda: self.cache.is_croppable)} compileable {ask(lambda: self.cache.is_compileable)} "
                        f"max {ask(lambda: self.cache.get_max_length())}")

    def done(self):
        print("\n".join(self.out))


def tables():
    for name, kind, w, m in (("sliding", "sliding", 4, 0), ("static sliding", "static_sliding", 4, 16), ("narrow", "static_sliding", 1, 8),
                             ("small", "static_sliding", 8, 4), ("dynamic", "dynamic", 0, 0), ("static", "static", 0, 12)):
        for chunks in ([2, 1, 1, 1], [6, 1, 3, 1], [3, 1, 2, 5], [4, 1, 1], [1] * 9):
            if kind == "static_sliding" and m < w:
                chunks = [1, 1, 2]
            c = Case(f"{name} {chunks}", [(kind, w, m, 0)])
            for q in chunks:
                c.update(0, q)
            c.lengths()
            c.whole()
            c.done()
    c = Case("recording", [("sliding", 4, 0, 0), ("dynamic", 0, 0, 0)])
    c.record()
    for q in (3, 1, 2, 5):
        c.update(0, q), c.update(1, q)
    for n in (-2, 0):
        c.crop(n)
        c.lengths()
        c.update(0, 2), c.update(1, 2)
    c.done()
    c = Case("guide", [("dynamic", 0, 0, 0), ("sliding", 2, 0, 0)])
    c.record()
    c.update(0, 6), c.update(1, 6)
    c.crop(-3)
    c.lengths()
    c.update(0, 1), c.update(1, 1)
    c.done()
    c = Case("not recording", [("sliding", 4, 0, 0)])
    c.update(0, 3)
    c.crop(-1)
    c.update(0, 1)
    c.crop(0)
    c.update(0, 1)
    c.crop(-1)
    c.crop(0)
    c.whole()
    c.done()
    for record in (False, True):
        c = Case(f"convolution, recording {record}", [("conv", 0, 0, 4)])
        if record:
            c.record()
        for q in (2, 1, 5, 1):
            c.conv(0, q)
        c.whole()
        c.crop(-1)
        c.conv(0, 3)
        c.crop(-2), c.crop(0)
        c.conv(0, 1)
        c.state(0), c.state(0)
        if not record:
            c.whole()
        c.done()
    c = Case("implicit kernel", [("conv", 0, 0, 0)])
    c.conv(0, 2), c.conv(0, 1), c.conv(0, 3)
    c.reset()
    c.conv(0, 1), c.conv(0, 4)
    c.done()
    c = Case("mixed", [("conv", 0, 0, 3), ("dynamic", 0, 0, 0), ("sliding", 3, 0, 0), ("dummy", 0, 0, 0), ("hybrid", 0, 0, 3)], rows=2)
    c.lengths(), c.whole()
    for q in (4, 1):
        for layer in (1, 2, 4):
            c.update(layer, q)
        c.conv(0, q), c.conv(4, q), c.state(0), c.state(4)
    c.lengths(), c.whole()
    c.reorder([1, 1])
    for layer in (1, 2, 4):
        c.update(layer, 1)
    c.conv(0, 1), c.state(4)
    c.reset()
    c.lengths()
    c.update(1, 2)
    c.done()


def random_case(rng, number):
    kinds = [("dynamic", 0, 0, 0), ("static", 0, 24, 0), ("sliding", rng.randint(2, 6), 0, 0), ("static_sliding", rng.randint(2, 6), 24, 0),
             ("static_sliding", 24, rng.randint(22, 24), 0)]
    layers = [rng.choice(kinds) for _ in range(rng.randint(1, 3))]
    dynamic = all(k in ("dynamic", "sliding") for k, *_ in layers)
    crops = all(k != "static_sliding" or w == 24 for k, w, *_ in layers)
    c = Case(f"random {number}", layers, rows=rng.randint(1, 2))
    recording = rng.random() < 0.6
    if recording:
        c.record()
    length, since = 0, 0
    for _ in range(9):
        what = rng.random()
        if what < 0.6 or length == 0:
            q = min(rng.choice((1, 1, 2, 3, 5)), 20 - length)
            if q <= 0:
                continue
            for i in range(len(layers)):
                c.update(i, q)
            length += q
            since += q
        elif what < 0.75 and crops:
            n = rng.randint(0, min(since, length) if recording else length)
            evicted = any(k == "sliding" and length >= w for k, w, *_ in layers)
            if not recording and evicted and len(layers) > 1:
                continue  # the library crops some layers and not others
            c.crop(-n)
            if recording or not evicted:
                length -= n
                since = 0
        elif what < 0.85:
            c.reorder([rng.randrange(c.rows) for _ in range(c.rows)])
        elif what < 0.92 and dynamic and c.rows < 4:
            c.repeat(2)
        elif what < 0.97 and dynamic:
            c.select([rng.randrange(c.rows) for _ in range(rng.randint(1, 2))])
        c.lengths()
    c.whole()
    c.done()


def masks():
    common = dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=1, num_key_value_heads=1, vocab_size=8)
    kinds = {
        "causal": (LlamaConfig(**common), create_causal_mask, 0),
        "sliding": (MistralConfig(sliding_window=3, **common), create_sliding_window_causal_mask, 3),
        "chunked": (Llama4TextConfig(attention_chunk_size=4, layer_types=["chunked_attention"], no_rope_layers=[1], **common),
                    create_chunked_causal_mask, 4),
    }
    for kind, (config, make, window) in kinds.items():
        config._attn_implementation = "eager"
        for pads in ([0, 0], [2, 0], [3, 5]):
            for static in (False, True):
                cache = C.StaticCache(config=config, max_cache_len=14) if static else C.DynamicCache(config=config)
                length = 0
                for q in (6, 1, 3):
                    two_d = torch.tensor([[int(t >= p) for t in range(length + q)] for p in pads])
                    m = make(config=config, inputs_embeds=torch.zeros(2, q, 16), attention_mask=two_d, cache=cache, position_ids=None)
                    n, offset = cache.get_mask_sizes(q, 0)
                    if m is None:
                        m = torch.zeros(2, 1, q, n).masked_fill(
                            torch.arange(n)[None, :] + offset > torch.arange(q)[:, None] + length, -1e9)
                    m = m.expand(2, -1, -1, -1)
                    rows = ["".join("1" if v > -1 else "." for v in m[b, 0, i].tolist()) for b in range(2) for i in range(q)]
                    print(f"mask {kind} {window} pads {pads[0]} {pads[1]} q {q} len {length} from {offset} => " + " ".join(rows))
                    k = torch.zeros(2, 1, q, 4)
                    cache.update(k, k, 0)
                    length += q


print("# Made by make-cache-traces.py with Transformers " + transformers.__version__)
tables()
rng = random.Random(524)
for number in range(24):
    random_case(rng, number)
masks()
sys.stdout.flush()
