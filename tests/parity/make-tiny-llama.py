#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/tiny-llama-*.gguf and .json: two random models of the Llama 3 kind and what Transformers in float32 says of them.

    make-tiny-llama.py OUT_FOLDER     (a few seconds; needs torch, transformers, tokenizers and gguf, versions as in make-oracle.py)

tied:   F16 matrices, no output.weight.
mixed:  untied, every matrix of another type; the oracle runs on the dequantised values.
Both: grouped-query attention, head size unlike n_embd / n_heads, rope_freqs.weight (Llama 3 scaling), byte-level BPE of 320 tokens.
"""

import importlib.util
import json
import os
import sys

import numpy as np
import torch
from gguf import GGMLQuantizationType as Q, GGUFWriter, dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM

spec = importlib.util.spec_from_file_location("oracle", os.path.join(os.path.dirname(os.path.abspath(__file__)), "make-oracle.py"))
oracle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)
oracle.N_GREEDY = 40
oracle.STEPS = (0, 1, 2, 7, 15, 31, 39)

V, E, FF, LAYERS, HEADS, KV_HEADS, HEAD = 320, 64, 96, 3, 4, 2, 32
CONTEXT, ORIGINAL_CONTEXT = 1024, 64
MIXED = {"attn_q": Q.Q4_0, "attn_k": Q.Q5_0, "attn_v": Q.Q8_0, "attn_output": Q.Q4_1, "ffn_gate": Q.Q5_1, "ffn_up": Q.Q4_1, "ffn_down": Q.BF16,
         "token_embd": Q.Q8_0, "output": Q.Q5_0}
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}


def make_model(tied, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=E, intermediate_size=FF, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=tied, attn_implementation="eager",
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": ORIGINAL_CONTEXT})
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(0, 0.5 if "embed" in name else 1.5 / p.shape[1] ** 0.5)
            else:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def gguf_name(name):
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[name]


def permute(w, n_heads):
    """Half-split rotary pairs (Transformers) to adjacent ones (arch llama in GGUF)."""
    return w.reshape(n_heads, 2, HEAD // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def add_tensors(writer, model, types):
    """Writes every tensor in its type and puts what that type holds back into the model."""
    for name, p in model.named_parameters():
        out, values = gguf_name(name), p.detach().numpy().astype(np.float32)
        part = out.split(".")[-1]
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        kind = Q.F32 if p.dim() == 1 else types.get(part, Q.F16)
        data = quantize(permute(values, heads) if heads else values, kind)
        writer.add_tensor(out + ".weight", data, raw_dtype=kind)
        back = dequantize(data, kind).reshape(values.shape)
        if heads:
            back = back.reshape(heads, HEAD // 2, 2, back.shape[1]).swapaxes(1, 2).reshape(back.shape)
        with torch.no_grad():
            p.copy_(torch.from_numpy(back.copy()))


def add_tokenizer(writer):
    """256 byte tokens in the order of GPT-2's table, 61 merges, 3 control tokens."""
    visible = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    letters, extra = {b: chr(b) for b in visible}, 0
    for b in range(256):
        if b not in letters:
            letters[b] = chr(256 + extra)
            extra += 1
    tokens = [letters[b] for b in range(256)]
    merges = []
    for word in "the and of to in is was that it he for on with as his at be this had not are from or have".split():
        piece = letters[32]
        for letter in word:
            if piece + letter not in tokens and len(merges) < V - 259:
                merges.append(f"{piece} {letter}")
                tokens.append(piece + letter)
            piece += letter
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    filler = [f"<unused{i}>" for i in range(V - len(tokens) - len(controls))]
    kinds = [1] * len(tokens) + [3] * (len(controls) + len(filler))
    tokens += controls + filler
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
                             "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def make(folder, name, tied, types, seed):
    model = make_model(tied, seed)
    path = os.path.join(folder, f"tiny-llama-{name}.gguf")
    writer = GGUFWriter(path, "llama")
    writer.add_name(f"tiny llama {name}")
    writer.add_license("apache-2.0")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(E)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(V)
    add_tokenizer(writer)
    scaled = model.model.rotary_emb.inv_freq.double().numpy()
    plain = 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    add_tensors(writer, model, types)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    columns = [i * (V - 1) // 63 for i in range(64)]
    rng = np.random.default_rng(seed)
    prompts = [(f"{n} tokens", rng.integers(0, 256, n).tolist()) for n in (1, 7, 33, 100, 300)]
    result = {"model": f"tiny-llama-{name}", "oracle": "Transformers 5.24.0, float32, eager attention", "tie": oracle.TIE, "columns": columns,
              "prompts": [oracle.run_prompt(model, label, ids, columns) for label, ids in prompts]}
    with open(os.path.join(folder, f"tiny-llama-{name}.json"), "w") as file:
        json.dump(result, file, separators=(",", ":"))
        file.write("\n")


def main():
    torch.set_num_threads(1)
    make(sys.argv[1], "tied", True, {}, 11)
    make(sys.argv[1], "mixed", False, MIXED, 12)


if __name__ == "__main__":
    main()
