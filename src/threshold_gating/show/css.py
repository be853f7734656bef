"""A report as an HTML document: one column of text, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

STYLE = """
:root { --paper: #fbfaf8; --card: #ffffff; --ink: #1d2330; --quiet: #606978; --rule: #e3e2de;
  --original: #b9c8e6; --seen: #e9e6de; --rounding: #eef3ee; --wrong: #b3261e;
  --g0: #1f4fa3; --g1: #c4501b; --g2: #007a5e; --g3: #8a2b83; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --card: #1b1f26; --ink: #e7e9ee;
  --quiet: #98a1b0; --rule: #2e343e; --original: #3d5582; --seen: #2b3038; --rounding: #1f2a26;
  --wrong: #ff8a80; --g0: #9cc0ff; --g1: #ffa36e; --g2: #5fd3b0; --g3: #e29be0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 48px 20px 64px; }
h1 { font-size: clamp(28px, 5vw, 42px); line-height: 1.15; letter-spacing: -.02em;
  margin: 0 0 16px; }
h2 { font-size: 23px; letter-spacing: -.01em; margin: 56px 0 12px; }
h3 { font-size: 17px; margin: 32px 0 12px; }
p, ol, dl { max-width: 46em; }
.lead { font-size: 18px; color: var(--ink); }
.small, .panels p { color: var(--quiet); font-size: 13px; margin: 6px 0 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 28px 0 0; }
.tiles div { flex: 1 1 200px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 12px; padding: 16px 20px; color: var(--quiet); font-size: 14px; }
.tiles b { display: block; font-size: 30px; line-height: 1.2; color: var(--ink);
  font-weight: 650; font-variant-numeric: tabular-nums; }
.digits { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 20px; }
.digits img { image-rendering: pixelated; border-radius: 6px; border: 1px solid var(--rule); }
table { width: 100%; border-collapse: collapse; background: var(--card); font-size: 14px;
  border: 1px solid var(--rule); font-variant-numeric: tabular-nums; margin: 16px 0 20px; }
th, td { text-align: right; padding: 9px 12px; border-top: 1px solid var(--rule); }
thead th { color: var(--quiet); font-weight: 500; border-top: 0; }
th:first-child, th:nth-child(4), td:nth-child(4) { text-align: left; }
tbody th { font-weight: 600; }
.wrong th, .wrong td { color: var(--wrong); font-weight: 700; }
details { color: var(--quiet); } summary { cursor: pointer; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 6px 20px; font-size: 14px; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
.key span { display: inline-block; width: 22px; height: 10px; margin: 0 4px 0 12px; }
.key span:first-child { margin-left: 0; }
.k-original { background: var(--original); border-radius: 5px; }
.k-seen { background: var(--seen); }
.k-rounding { background: var(--rounding); outline: 1px solid var(--rule); }
.key .k-gate { height: 0; border-top: 2px solid var(--g0); vertical-align: middle; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 310px), 1fr));
  gap: 16px; }
figure { display: flex; flex-direction: column; min-width: 0; margin: 0; padding: 14px 16px;
  background: var(--card); border: 1px solid var(--rule); border-radius: 12px; }
figcaption { font-size: 14px; line-height: 1.45; overflow-wrap: anywhere; margin-bottom: 8px; }
code { font: 12px ui-monospace, "SF Mono", Menlo, Consolas, monospace; color: var(--quiet); }
figure ul { list-style: none; margin: 4px 0 0; padding: 0; font-size: 13px; }
svg { display: block; width: 100%; height: auto; margin-top: auto; }
svg text { font-size: 10px; fill: var(--quiet); }
svg path { fill: none; stroke-linejoin: round; }
svg .axis { stroke: var(--quiet); stroke-width: .8; }
svg .grid { stroke: var(--rule); stroke-width: .6; }
svg .seen { fill: var(--seen); } svg .rounding { fill: var(--rounding); }
svg .original { stroke: var(--original); stroke-width: 6; stroke-linecap: round; }
svg .gate { stroke-width: 1.6; }
.mark { display: inline-block; width: 16px; border-top: 2px solid; vertical-align: middle;
  margin-right: 7px; }
.g0 { stroke: var(--g0); color: var(--g0); } .g1 { stroke: var(--g1); color: var(--g1); }
.g2 { stroke: var(--g2); color: var(--g2); } .g3 { stroke: var(--g3); color: var(--g3); }
@media (max-width: 700px) {
  main { padding: 28px 16px 48px; }
  thead { display: none; } table, tbody, tr, tbody th, td { display: block; width: 100%; }
  tr { padding: 10px 0; border-top: 1px solid var(--rule); }
  tbody th, td { border: 0; padding: 3px 14px; }
  td { display: flex; justify-content: space-between; }
  td::before { content: attr(data-label); color: var(--quiet); }
  dl { grid-template-columns: 1fr; gap: 2px; } dd { margin-bottom: 8px; }
}
"""


def document(title: str, *body: str) -> str:
    """The whole document, which needs no other file and no network."""
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
    )
    return "\n".join([*head, *body, "</main></body></html>\n"])


def listed(facts: Mapping[str, Any]) -> str:
    """Facts with their names, as an HTML list."""
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items())
    return f"<dl>{items}</dl>"
