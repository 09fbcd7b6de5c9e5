"""A provider from outside jfabench, whole: one SDPA call for each sequence, as somebody's model might do it.

An installed package offers it by an entry point in its `pyproject.toml`:

    [project.entry-points."jfabench.providers"]
    looped_sdpa = "looped_sdpa"
"""

from dataclasses import dataclass

from jfabench.operator import Call


@dataclass(frozen=True)
class LoopedSdpa:
    name: str = "looped_sdpa"
    operator: str = "jagged_attention"
    summary: str = "one scaled_dot_product_attention call a sequence, concatenated"

    def unavailable(self, device):
        return None

    def unsupported(self, params, direction):
        if direction != "fwd":
            return "forward only"
        if params.bounds != (-1, -1):
            return "no masks"
        return None

    def prepare(self, inputs, direction):
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        keys = inputs.k.split(inputs.k_lengths.tolist())
        values = inputs.v.split(inputs.k_lengths.tolist())
        queries = inputs.expanded_q().split(inputs.q_lengths.tolist())

        def run():
            outs = []
            for q, k, v in zip(queries, keys, values, strict=True):
                if len(k) == 0:
                    outs.append(torch.zeros_like(q))
                    continue
                q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
                out = scaled_dot_product_attention(q, k, v, scale=inputs.sm_scale, enable_gqa=True)
                outs.append(out[0].transpose(0, 1))
            return torch.cat(outs)

        return Call(run, lambda out: {"out": out})


PROVIDERS = [LoopedSdpa()]
