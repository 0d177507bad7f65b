"""Attention with every option of FlashAttention, in plain torch operations: for any device, and for options that no
fused kernel has (softcap, ALiBi). Used by compat/flash.py and flash_attend.py.

    out, lse = dense(q, k, v, Rule(left=-1, right=0, scale=0.125))     # (B, Tq, H, D) and (B, Tk, K, D), causal

scaled_dot_product_attention where it knows all that is asked for, else the formula: all scores at once, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ascendchat.device.attention import HIDDEN

SMALL = 128  # a window is cut into blocks of at least so many queries


class Rule(NamedTuple):
    """Options of attention: which keys a query sees, and what is done to the scores. The last query stands at the last
    key."""

    left: int  # so many keys before the query's own place are seen; -1: all
    right: int  # and so many behind it; 0 is causal, -1: all
    scale: float
    softcap: float = 0.0  # 0: none, else scores become softcap · tanh(scores / softcap)
    slopes: Tensor | None = None  # (H,) or (B, H): ALiBi, score - slope · |distance|
    dropout: float = 0.0
    lse: bool = False  # the logsumexp of the scores is wanted

    def for_lengths(self, queries: int, keys: int) -> Rule:
        """This rule without the limits that hide nothing at these lengths."""
        left = -1 if self.left >= keys - 1 else self.left
        return self._replace(left=left, right=-1 if self.right >= max(queries - 1, 0) else self.right)

    @property
    def changes_scores(self) -> bool:
        return self.softcap > 0 or self.slopes is not None


def blind(rule: Rule, queries: int, keys: int) -> int:
    """Number of queries that see nothing; they are the first ones."""
    if keys == 0:
        return queries
    return 0 if rule.right < 0 else max(0, queries - keys - rule.right)


def inside(own: Tensor, places: Tensor, rule: Rule) -> Tensor:
    """(..., Tq, S): whether the limits let the query at the place `own` (..., Tq) see the key at one of `places`."""
    own = own[..., None]
    seen = places >= own - rule.left if rule.left >= 0 else torch.ones_like(places, dtype=torch.bool)
    return seen & (places <= own + rule.right if rule.right >= 0 else torch.ones_like(own, dtype=torch.bool))


def dense(q: Tensor, k: Tensor, v: Tensor, rule: Rule, *, formula: bool = False) -> tuple[Tensor, Tensor | None]:
    """(B, Tq, H, D), and (B, H, Tq) if wanted. Every query sees a key. `formula`: without SDPA, whose hidden scores of
    -inf some chips report as overflow. A window is cut into blocks of queries with the keys in their sight, so that
    nothing of the size of all scores exists."""
    queries, keys = q.size(1), k.size(1)
    if rule.left < 0 or rule.right < 0:
        return _block(q, k, v, 0, keys - queries, rule, formula)
    size, parts = max(rule.left + rule.right + 1, SMALL), []
    for start in range(0, queries, size):
        stop, first = min(start + size, queries), start + keys - queries  # `first`: the place of the first query
        low, high = max(0, first - rule.left), min(keys, first + stop - start + rule.right)
        parts.append(_block(q[:, start:stop], k[:, low:high], v[:, low:high], low, first, rule, formula))
    out = torch.cat([out for out, _ in parts], 1)
    return out, torch.cat([lse for _, lse in parts if lse is not None], 2) if rule.lse else None


def _block(
    q: Tensor, k: Tensor, v: Tensor, low: int, first: int, rule: Rule, formula: bool
) -> tuple[Tensor, Tensor | None]:
    """Queries that stand at `first` and after, with keys that stand at `low` and after."""
    places = torch.arange(low, low + k.size(1), device=q.device)
    own = torch.arange(first, first + q.size(1), device=q.device)
    if formula or rule.lse or rule.changes_scores:
        return by_formula(q, k, v, own, places, inside(own, places, rule), rule)
    causal = rule.left < 0 and rule.right == 0 and q.size(1) == k.size(1)
    free = rule.left < 0 and rule.right < 0
    return by_sdpa(q, k, v, None if causal or free else inside(own, places, rule), rule, causal), None


def cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    totals: Tensor,
    starts: Tensor | None,
    rule: Rule,
    *,
    whole: bool = False,
    formula: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Row b of the cache (B, S, K, D) holds keys from `starts[b]` (or 0) to `totals[b]`; queries that see none of them
    give 0, and a logsumexp of inf. `whole`: every row is full."""
    queries, places = q.size(1), torch.arange(k.size(1), device=q.device)
    own = (totals[:, None] - queries + torch.arange(queries, device=q.device))[:, None]  # (B, 1, Tq)
    held = places < totals[:, None]  # (B, S)
    if starts is not None:
        held = held & (places >= starts[:, None])
    if not whole:  # unwritten memory may hold NaN, which a weight of 0 does not hide
        k, v = (x.masked_fill(~held[:, :, None, None], 0) for x in (k, v))
    seen = inside(own, places, rule) & held[:, None, None]  # (B, 1, Tq, S)
    if formula or rule.lse or rule.changes_scores:
        out, lse = by_formula(q, k, v, own, places, seen, rule)
    else:
        out, lse = by_sdpa(q, k, v, seen, rule, False), None
    none = ~seen.any(-1)  # (B, 1, Tq)
    if lse is not None:
        lse = lse.masked_fill(none, float("inf"))
    return out.masked_fill(none.transpose(1, 2)[..., None], 0), lse


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, rule: Rule, causal: bool) -> Tensor:
    grouped = q.size(2) != k.size(2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, dropout_p=rule.dropout, is_causal=causal, scale=rule.scale, enable_gqa=grouped
    ).transpose(1, 2)


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, own: Tensor, places: Tensor, seen: Tensor, rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """Places of queries and keys as `inside` takes them; `seen` is (Tq, S) or (B, 1, Tq, S)."""
    heads, groups = k.size(2), q.size(2) // k.size(2)
    high = torch.promote_types(q.dtype, torch.float32)
    query = (q.to(high) * rule.scale).unflatten(2, (heads, groups)).permute(0, 2, 3, 1, 4)  # (B, K, G, Tq, D)
    key, value = (x.to(high).transpose(1, 2).unsqueeze(2) for x in (k, v))  # (B, K, 1, S, D)
    scores = query @ key.mT
    if rule.softcap > 0:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    if rule.slopes is not None:
        distance = (own[..., None] - places).abs().unsqueeze(-3)  # (..., 1, Tq, S)
        scores = scores - rule.slopes.to(high).view(-1, heads, groups, 1, 1) * distance
    scores = scores.masked_fill(~seen.unsqueeze(-3), HIDDEN)
    weights = scores.softmax(-1)
    if rule.dropout:
        weights = F.dropout(weights, rule.dropout)
    out = (weights @ value).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
    return out, scores.detach().logsumexp(-1).flatten(1, 2) if rule.lse else None
