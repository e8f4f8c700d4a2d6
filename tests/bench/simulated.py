# SPDX-License-Identifier: Apache-2.0
"""Streaming on the simulated small GPU (tests/sim): decode steps against the best schedule that their own stage times allow.

The floor is a schedule worked out from the timeline of the run that it judges: kernels take as long as they took, copies bytes / link rate
behind the link's latency, the host between two steps as long as with the cache on the device.  It knows three rules: one kernel at a time
in order, one copy each way at a time in order, a slot of the ring is filled when the kernel that read it before is done.  Nothing else
may cost time: no copy that starts late, no kernel that waits for what it does not read, no gap."""
import json, os, random, statistics, struct, subprocess

LINKS = (5, 10, 20)


# ---- a toy: few layers of a small model, whose past is all that a step reads -----------------------------------------------------------

def write_toy(path, n_layers=10, n_embd=256, n_heads=1, n_kv_heads=1, head=64, n_ff=256, context=40960):
    """A Llama of random numbers with byte tokens."""
    source, tensors, keys = random.Random(1), [], []

    def text(value):
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    def key(name, kind, data):
        keys.append(text(name) + struct.pack("<I", kind) + data)

    def u32(name, value):
        key(name, 4, struct.pack("<I", value))

    def tensor(name, *dims):
        n = 1
        for d in dims:
            n *= d
        if len(dims) == 1:
            tensors.append((name, dims, 0, struct.pack("<f", 1.0) * n))
        else:  # halves of either sign between 2^-6 and 2^-5
            tensors.append((name, dims, 1, (source.getrandbits(16 * n) & int("83ff" * n, 16) | int("2400" * n, 16)).to_bytes(2 * n, "little")))

    visible = [b for b in range(256) if 33 <= b < 127 or 161 <= b < 173 or 174 <= b]
    letters = {b: chr(b) for b in visible}
    letters.update({b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)})
    tokens = [letters[b] for b in range(256)] + ["<|0|>", "<|1|>", "<|2|>"]
    key("general.architecture", 8, text("llama"))
    key("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))
    for name, value in (("block_count", n_layers), ("context_length", context), ("embedding_length", n_embd), ("feed_forward_length", n_ff),
                        ("attention.head_count", n_heads), ("attention.head_count_kv", n_kv_heads), ("attention.key_length", head),
                        ("attention.value_length", head), ("rope.dimension_count", head)):
        u32("llama." + name, value)
    key("tokenizer.ggml.model", 8, text("gpt2"))
    key("tokenizer.ggml.pre", 8, text("smollm"))
    key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, len(tokens)) + b"".join(text(t) for t in tokens))
    key("tokenizer.ggml.token_type", 9, struct.pack("<IQ", 5, len(tokens)) + struct.pack(f"<{len(tokens)}i", *[1] * 256, 3, 3, 3))
    key("tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 0))
    u32("tokenizer.ggml.eos_token_id", 258)
    tensor("token_embd.weight", n_embd, len(tokens))
    tensor("output_norm.weight", n_embd)
    for l in range(n_layers):
        for name, *dims in (("attn_norm", n_embd), ("attn_q", n_embd, n_heads * head), ("attn_k", n_embd, n_kv_heads * head),
                            ("attn_v", n_embd, n_kv_heads * head), ("attn_output", n_heads * head, n_embd), ("ffn_norm", n_embd),
                            ("ffn_gate", n_embd, n_ff), ("ffn_up", n_embd, n_ff), ("ffn_down", n_ff, n_embd)):
            tensor(f"blk.{l}.{name}.weight", *dims)
    data = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)) + b"".join(keys)
    offset, body = 0, b""
    for name, dims, kind, values in tensors:
        data += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        values += bytes(-len(values) % 32)
        offset += len(values)
        body += values
    with open(path, "wb") as file:
        file.write(data + bytes(-len(data) % 32) + body)


# ---- the timeline and the floor ----------------------------------------------------------------------------------------------------------

class Timeline:
    """A traced run: commands of the three queues in order, usec."""

    def __init__(self, path, run):
        events = [e for e in json.load(open(path))["traceEvents"] if e.get("ph") == "X"]
        queues = [sorted((e for e in events if e["tid"] == tid), key=lambda e: e["ts"]) for tid in (1, 2, 3)]
        self.compute, self.uploads, self.downloads = queues
        self.run = run
        begins = [i for i, e in enumerate(self.compute) if e["name"] == "kv inputs"] + [len(self.compute)]
        self.steps = [self.compute[a:b] for a, b in zip(begins, begins[1:])]
        assert len(self.steps) == len(run["step_usec"]), (len(self.steps), len(run["step_usec"]))

    def walls(self):
        """From the first command of each step to that of the next."""
        return [b[0]["ts"] - a[0]["ts"] for a, b in zip(self.steps, self.steps[1:])]

    def packs(self):
        """Whether a step completes pages, which go home."""
        return [any(e["name"].startswith("attend_pack") for e in step) for step in self.steps[:-1]]

    def host_gap(self):
        """What the host takes from the last command of a step to the first of the next."""
        return statistics.median(b[0]["ts"] - a[-1]["ts"] - a[-1]["dur"] for a, b in zip(self.steps, self.steps[1:]))

    def launch_gap(self):
        """Between two kernels of which the second waits for nothing but the first."""
        gaps = []
        for step in self.steps:
            for a, b in zip(step, step[1:]):
                if not waits(b):
                    gaps.append(max(b["ts"] - a["ts"] - a["dur"], 0.0))
        return statistics.median(gaps)

    def n_layers(self):
        return sum(ends_layer(e) for e in self.steps[0])

    def kernel_usec(self):
        return statistics.median(sum(e["dur"] for e in step if e["cat"] == "kernel") for step in self.steps)


def reads_tile(event):
    return event["name"].startswith(("attend_tile", "attend_whole"))


def ends_layer(event):
    return event["name"].startswith(("attend_finish", "attend_whole"))


def waits(event):
    return reads_tile(event) or event["name"] == "kv gate"


def is_part(event):
    return event["name"].startswith("linear")


class Link:
    """Copies to the device, one at a time in the order in which the host queues them, from two rings: tiles of the cache, parts of weights."""

    def __init__(self, timeline):
        run = timeline.run
        self.rate, self.latency = run["link_rate"] / 1e6, run["latency_nsec"] / 1e3
        self.slots = {"tile": run["slots"], "part": run["weight_slots"]}
        parts = [b for b in run["parts"] if b > 0]
        self.sizes = {"tile": [b for tiles in run["tiles"] for _ in range(timeline.n_layers()) for b in tiles if b > 0],
                      "part": parts * len(timeline.steps)}
        self.order, self.n_queued, self.n_read = [], {"tile": 0, "part": 0}, {"tile": 0, "part": 0}
        self.arrived, self.consumed, self.free, self.next = {}, {"tile": [], "part": []}, 0.0, 0
        self.queue("tile", self.slots["tile"])
        self.queue("part", self.slots["part"])
        self.n_parts = len(parts)

    def queue(self, ring, end):
        for number in range(self.n_queued[ring], min(end, len(self.sizes[ring]))):
            self.order.append((ring, number))
            self.n_queued[ring] = number + 1

    def arrival(self, ring):
        """When that is there which the next launch reads."""
        number = self.n_read[ring]
        self.queue(ring, number + 1)
        while (ring, number) not in self.arrived:
            r, i = self.order[self.next]
            ready = self.consumed[r][i - self.slots[r]] if i >= self.slots[r] else 0.0
            self.free = max(self.free, ready + self.latency) + self.sizes[r][i] / self.rate
            self.arrived[r, i] = self.free
            self.next += 1
        return self.arrived[ring, number]

    def read(self, ring, time):
        """The launch has ended.  Parts are queued behind the launch after the one that frees their slot, but at the end of a step."""
        self.consumed[ring].append(time)
        self.n_read[ring] += 1
        behind = ring == "part" and self.n_read[ring] % self.n_parts != 0
        self.queue(ring, self.n_read[ring] + self.slots[ring] - behind)


def floors(timeline, host_gap, launch_gap):
    """The best schedule of a run's steps: usec from the begin of each to that of the next."""
    run, link = timeline.run, Link(timeline)
    n_packs = sum(e["name"].startswith("attend_pack") for e in timeline.compute)
    home = sum(e["args"]["bytes"] for e in timeline.downloads) / max(1, n_packs) / link.rate
    time, marks, down_free, homewards = 0.0, [], 0.0, {}
    for step, tiles in zip(timeline.steps, run["tiles"]):
        marks.append(time)
        layer = tile = part = 0
        for i, event in enumerate(step):
            time += launch_gap if i > 0 else 0.0
            if event["name"] == "kv gate":  # the scratch of packed pages, of which there are two
                time = max(time, homewards.get(layer & 1, 0.0))
                continue
            ring = None
            if reads_tile(event) and tile < len(tiles):
                ring, tile = "tile" if tiles[tile] else None, tile + 1
            elif is_part(event):
                ring, part = "part" if run["parts"][part] else None, part + 1
            if ring:
                time = max(time, link.arrival(ring))
            time += event["dur"]
            if ring:
                link.read(ring, time)
            if event["name"].startswith("attend_pack"):
                down_free = homewards[layer & 1] = max(down_free, time + link.latency) + home
            elif ends_layer(event):
                layer, tile = layer + 1, 0
        assert part == len(run["parts"]), (part, len(run["parts"]))
        time += host_gap
    return [b - a for a, b in zip(marks, marks[1:])]


# ---- the bench ---------------------------------------------------------------------------------------------------------------------------

CODED = "strategy=offloaded_quantized,"
FORMS = {"f16": "strategy=offloaded", "leat": CODED + "nbits_key=5,nbits_value=4", "hqq": CODED + "backend=hqq,nbits=4",
         "quanto": CODED + "backend=quanto,nbits=4", "fp8": CODED + "backend=fp8"}
POLICIES = [
    ("offloaded", "f16", "prefetch=2"), ("offloaded, 1 slot", "f16", "prefetch=1"), ("offloaded, 4 slots", "f16", "prefetch=4"),
    ("offloaded_static", "f16", "strategy=offloaded_static"), ("offloaded, half resident", "f16", "resident=50"),
    ("offloaded_quantized", "leat", ""), ("leat, 1 slot", "leat", "prefetch=1"), ("leat, 4 slots", "leat", "prefetch=4"),
    ("leat, 8 slots", "leat", "prefetch=8"), ("leat, half resident", "leat", "resident=50"), ("leat, small tiles", "leat", "tile=8,prefetch=4"),
    ("leat, 4 sequences", "leat", "sequences=4"), ("leat, 2 x 2 forks", "leat", "sequences=2,forks=2"),
    ("hqq 4", "hqq", ""), ("quanto 4", "quanto", ""), ("fp8", "fp8", ""),
]
TILE_USEC = 1000  # smaller tiles are shown, not judged
BAR = 1.05


class Bench:
    def __init__(self, build, model, work, environment):
        self.build, self.work = build, work
        self.environment = environment
        self.models = {"SmolLM2": model, "toy": os.path.join(work, "toy.gguf")}
        write_toy(self.models["toy"])
        for name in ("pasts", "timelines"):
            os.makedirs(os.path.join(work, name), exist_ok=True)
        self.read_rate = None

    def start(self, model, depth, ratio, policies, steps):
        """Runs policies one after the other; the layer is left out with ratio None (to make the pasts with all of the machine)."""
        environment = dict(self.environment)
        trace = os.path.join(self.work, "timelines", f"{model}-{depth}-{ratio}")
        os.makedirs(trace, exist_ok=True)
        if ratio:
            environment.update(OPENCL_LAYERS=os.path.join(self.build, "tests/sim/libclsim.so"), POCL_MAX_PTHREAD_COUNT="1", POCL_AFFINITY="1",
                               CLSIM_UNIFIED="0", CLSIM_LINK_RATIO=str(ratio), CLSIM_LATENCY_USEC="10",
                               LD_PRELOAD=os.path.join(self.build, "tests/sim/libawake.so"))
            if self.read_rate:
                environment["CLSIM_READ_RATE"] = str(self.read_rate)
        programs = os.path.join(self.work, "simulated" if ratio else "programs")
        os.makedirs(programs, exist_ok=True)
        # The first processor is the kernels' (POCL_AFFINITY), the last the copies': there the host, too, whose turn would hold up either.
        command = ["taskset", "-c", str(max(os.sched_getaffinity(0)))] if ratio else []
        command += [os.path.join(self.build, "tests/bench/bench-stream"), self.models[model], f"depth={depth}", f"steps={steps}", f"trace={trace}",
                   f"images={self.work}/pasts", f"state={self.work}", f"programs={programs}", *policies]
        runs = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
        self.read_rate = self.read_rate or runs[0]["read_rate"]
        return {run["name"]: Timeline(f"{trace}/{run['name']}.json", run) for run in runs}


def policy(name, form, more):
    """NAME:KEY=VALUE,… of bench-stream: the keys of the form, replaced by those of the policy."""
    keys = dict(key.split("=") for key in (FORMS[form] + "," + more).split(",") if key)
    if keys["strategy"].startswith("offloaded"):
        keys.setdefault("transfer", "copy")
    return name.replace(" ", "-").replace(",", "") + ":" + ",".join(f"{k}={v}" for k, v in keys.items())


def resident(form, more):
    """The same past with its home on the device: a policy that says what the host does between two steps."""
    keys = [key for key in more.split(",") if key.split("=")[0] in ("sequences", "forks")]
    strategy = "strategy=dynamic" if form == "f16" else "strategy=quantized"
    return policy("resident " + form + "".join(" " + k.replace("=", "") for k in keys), form, ",".join([strategy, *keys]))


def judge(name, timeline, host_gap, kernel_usec):
    """Prints a line; returns wall / floor, or None when it is not judged."""
    run = timeline.run
    walls, best = timeline.walls(), floors(timeline, min(host_gap, timeline.host_gap()), timeline.launch_gap())
    ratios = [(w / f, packs) for w, f, packs in zip(walls, best, timeline.packs())]
    plain, packing = [r for r, packs in ratios if not packs], [r for r, packs in ratios if packs]
    tile = max(max(tiles) for tiles in run["tiles"]) / run["link_rate"] * 1e6
    copies = statistics.median(sum(t) for t in run["tiles"]) * timeline.n_layers() / run["link_rate"] * 1e6
    low, ratio, high = statistics.quantiles(plain, n=4)
    judged = tile >= TILE_USEC
    print(f"    {name:26} {run['slots']} slots, tiles of {tile / 1000:5.2f} ms; kernels {timeline.kernel_usec() / 1000:6.1f} ms (resident "
          f"{kernel_usec / 1000:6.1f}), copies {copies / 1000:6.1f} ms; wall {statistics.median(walls) / 1000:6.1f} ms, floor "
          f"{statistics.median(best) / 1000:6.1f} ms: {ratio:.3f} ({low:.3f} .. {high:.3f})"
          + (f", packing {max(packing):.3f}" if packing else "") + ("" if judged else "   [tiles below 1 ms: not judged]"), flush=True)
    return ratio if judged else None


def stolen():
    """Seconds in which a hypervisor gave this machine's processors to others, since it was started."""
    with open("/proc/stat", encoding="ascii") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def bench(build, model, work, environment, cases=(("SmolLM2", 2048), ("SmolLM2", 8064), ("toy", 32768)), links=LINKS, policies=POLICIES):
    """Bar 6 on the simulated small GPU.  What is beyond it is measured once more, alone: on a machine that others disturb for seconds at a time,
    ten cases in a row are too slow, and which ones is chance.  Both counts are told."""
    b, judged, n_first = Bench(build, model, work, environment), {}, 0
    b.start("SmolLM2", 64, 10, [policy("read-rate", "leat", "")], 2)
    print(f"  kernels read {b.read_rate / 1e9:.1f} GB/s with one thread")
    for name, depth in cases:
        b.start(name, depth, None, [policy(form, form, "") for form in FORMS], 2)
        for link in links:
            print(f"  {name}, {depth:,} tokens, link 1/{link}")
            stays = {resident(form, more): None for _, form, more in policies}
            still = b.start(name, depth, link, list(stays), 13)
            n_steps = 34 if link == links[0] else 21
            moving = b.start(name, depth, link, [policy(*p) for p in policies], n_steps)
            for p in policies:
                stay, timeline = still[resident(*p[1:]).split(":")[0]], moving[policy(*p).split(":")[0]]
                ratio = judge(p[0], timeline, stay.host_gap(), stay.kernel_usec())
                if not ratio:
                    continue
                n_first += ratio <= BAR
                if ratio > BAR:
                    before = stolen()
                    timeline = b.start(name, depth, link, [policy(*p)], n_steps)[policy(*p).split(":")[0]]
                    ratio = judge(f"  again, {stolen() - before:.2f} s stolen", timeline, stay.host_gap(), stay.kernel_usec())
                judged.setdefault(link, []).append((ratio, f"{p[0]}, {name} at {depth:,}"))
    for link, ratios in judged.items():
        title = f"wall / simulated floor, link 1/{link}"
        print(f"{title:34} median {statistics.median(r for r, _ in ratios):.3f}, worst {max(ratios)[0]:.3f} ({max(ratios)[1]})   bar <= {BAR}")
    ratios = [r for some in judged.values() for r, _ in some]
    print(f"{'wall / simulated floor':34} {sum(r <= BAR for r in ratios)} of {len(ratios)} within the bar, {n_first} the first time")


WEIGHTS = [("weights at 40 %", "strategy=quantized,weights=40"),
           ("weights at 40 %, cache", "weights=40"), ("weights at 70 %, cache", "weights=70")]


def weights(build, model, work, environment, depth=2048, links=LINKS):
    """Weights that stream, alone and beside the cache, against the same schedule; and against all of them resident."""
    b, worst = Bench(build, model, work, environment), (0, "")
    b.start("SmolLM2", depth, None, [policy("leat", "leat", "")], 2)
    for link in links:
        runs = b.start("SmolLM2", depth, link, [resident("leat", "")] + [policy(name, "leat", more) for name, more in WEIGHTS], 13)
        stay = runs[resident("leat", "").split(":")[0]]
        for name, more in WEIGHTS:
            timeline = runs[policy(name, "leat", more).split(":")[0]]
            walls, run = timeline.walls(), timeline.run
            best = floors(timeline, stay.host_gap(), timeline.launch_gap())
            low, ratio, high = statistics.quantiles([w / f for w, f, packs in zip(walls, best, timeline.packs()) if not packs], n=4)
            parts = sum(run["parts"]) / run["link_rate"] * 1e3
            print(f"  link 1/{link} {name:26} kernels {timeline.kernel_usec() / 1000:5.1f} ms, copies of weights {parts:5.1f} ms; wall "
                  f"{statistics.median(walls) / 1000:5.1f} ms (all resident {statistics.median(stay.walls()) / 1000:5.1f}), floor "
                  f"{statistics.median(best) / 1000:5.1f} ms: {ratio:.3f} ({low:.3f} .. {high:.3f})", flush=True)
            worst = max(worst, (ratio, f"{name}, link 1/{link}"))
    print(f"{'wall / simulated floor, weights':34} worst {worst[0]:.3f} ({worst[1]})   bar <= {BAR}")
