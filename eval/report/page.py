"""The page: one HTML file that asks the network for nothing, for a screen and for paper."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gemq.eval.report.tables import Missing, Section, Table

_STYLE = """
:root { --ink: #1a1a1a; --soft: #595959; --line: #d4d4d4; --blue: #005a8e; --bad: #b04a00; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.6rem 1.2rem 3rem; max-width: 62rem; color: var(--ink); background: #fff;
       font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
h1 { font-size: 1.65rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .5rem; padding-top: .7rem; border-top: 2px solid var(--ink); }
p { max-width: 48rem; margin: .4rem 0 .8rem; } .soft, figcaption, .note { color: var(--soft); font-size: .88rem; }
.verdict { font-size: 1.05rem; font-weight: 600; border-left: .4rem solid var(--blue); padding: .3rem .8rem; margin: .8rem 0; background: #f3f6f9; }
.verdict.failed { border-color: var(--bad); border-left-style: double; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; margin: .8rem 0; font-size: .92rem; }
a { color: var(--blue); } figure { margin: .6rem 0; } figure svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; margin: .6rem 0 1rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; min-width: 22rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { text-align: left; padding: .22rem .9rem .22rem 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: break-word; }
th { border-bottom: 1.5px solid var(--ink); } th.n, td.n { text-align: right; } td.n { white-space: nowrap; }
code { font: .88em ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; background: #f1f1f1; padding: .05em .3em; border-radius: 3px;
       overflow-wrap: anywhere; }
dt { font-weight: 600; margin-top: .7rem; } dd { margin: .1rem 0 0; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; } h2, section > p { break-after: avoid; } h2 { margin-top: 1.2rem; }
  figure, tr, .verdict, dl > div { break-inside: avoid; } .wide { overflow: visible; } table { font-size: 8pt; } a { color: inherit; }
  @page { margin: 16mm 14mm; }
}
"""


def html_page(title: str, opening: Sequence[str], verdicts: Sequence[tuple[str, bool]], sections: Sequence[tuple[Section, str]],
              missing: Sequence[Missing]) -> str:  # fmt: skip
    """The whole page. `opening`: paragraphs; `verdicts`: (sentence, whether it is good news); `sections`: each with its figure's SVG or ""."""
    anchors = [(section.key, section.title) for section, _ in sections] + ([("missing", "What is missing")] if missing else [])
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        # nothing is fetched, whatever a name that came from a stranger's file might try
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>",
        "</head>", "<body>", "<header>", f"<h1>{escape(title)}</h1>", *(f'<p class="soft">{escape(text)}</p>' for text in opening),
        *(f'<p class="verdict{"" if good else " failed"}">{"✓" if good else "✗"} {escape(text)}</p>' for text, good in verdicts), "</header>",
        '<nav aria-label="Sections"><ul>', *(f'<li><a href="#{key}">{escape(name)}</a></li>' for key, name in anchors), "</ul></nav>", "<main>",
        *(_section(section, svg) for section, svg in sections), *([_missing(missing)] if missing else []), "</main>", "</body>", "</html>", "",
    ])  # fmt: skip


def _section(section: Section, svg: str) -> str:
    parts = [f'<section id="{section.key}">', f"<h2>{escape(section.title)}</h2>", *(f"<p>{escape(text)}</p>" for text in section.text)]
    if svg:
        parts.append(f"<figure>{svg}<figcaption>{escape(section.figure)}. The same as {section.key}.png; its numbers are in {section.key}.json."
                     "</figcaption></figure>")  # fmt: skip
    parts += [_table(table) for table in section.tables]
    parts += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        made = (f'<{tag}{scope}{" class=" + chr(34) + "n" + chr(34) if place in table.numeric else ""}>{escape(cell)}</{tag}>'
                for place, cell in enumerate(cells))  # fmt: skip
        return f"<tr>{''.join(made)}</tr>"

    head = f"<thead>{row(table.columns, 'th')}</thead>" if any(table.columns) else ""
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    return f'<div class="wide"><table>{caption}{head}<tbody>{"".join(row(cells, "td") for cells in table.rows)}</tbody></table></div>'


def _missing(missing: Sequence[Missing]) -> str:
    entries = "".join(f"<div><dt>{escape(one.title)}</dt><dd>{escape(one.why)}: <code>{escape(one.command)}</code></dd></div>" for one in missing)
    return f'<section id="missing"><h2>What is missing</h2><dl>{entries}</dl></section>'
