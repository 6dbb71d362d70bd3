"""The style sheet of the report and the index: system fonts, one accent colour, readable on paper."""

CSS = """
:root { --ink: #1b2430; --soft: #5b6776; --line: #dfe4ea; --paper: #fff; --ground: #f4f6f8; --accent: #0072b2; --bad: #c04a00;
  --wait: #8a6d00; }
* { box-sizing: border-box; }
html { background: var(--ground); scroll-behavior: smooth; }
body { margin: 0 auto; max-width: 66rem; padding: 2.2rem 3rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1, h2, h3, h4, h5 { line-height: 1.25; margin: 0; text-wrap: balance; }
h1 { font-size: 1.9rem; letter-spacing: -.015em; }
h2 { font-size: 1.35rem; }
h3 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; }
h4, h5 { font-size: 1rem; margin: 1.3rem 0 .4rem; }
p { margin: .5rem 0; max-width: 48rem; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
code, pre, .mono { font-family: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .86em; }
.kicker { color: var(--accent); font-size: .78rem; font-weight: 600; letter-spacing: .09em; text-transform: uppercase;
  margin: 0 0 .3rem; }
.about { max-width: none; color: var(--soft); margin: .4rem 0 0; }
.verdict { margin: 1.5rem 0; padding: .95rem 1.2rem; border-left: 5px solid var(--accent); background: #eef6fb;
  border-radius: 0 6px 6px 0; }
.verdict b { font-size: 1.12rem; }
.verdict p { margin: .25rem 0 0; }
.verdict.failed, .verdict.died { border-color: var(--bad); background: #fdf1ea; }
.verdict.failed b, .verdict.died b { color: var(--bad); }
.verdict.interrupted, .verdict.running, .verdict.unfinished { border-color: var(--wait); background: #fbf7e6; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.6rem, 1fr)); margin: 1.5rem 0; padding: 0;
  border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
.tile { box-shadow: 0 0 0 .5px var(--line); padding: .8rem 1rem; }
.tile dt { color: var(--soft); font-size: .8rem; }
.tile dd { margin: .1rem 0 0; font-size: 1.45rem; font-weight: 600; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile dd small { white-space: normal; display: block; color: var(--soft); font-size: .76rem; font-weight: 400; letter-spacing: 0; }
.tile.lead { background: #eef6fb; grid-column: span 2; }
.tile.lead dd { color: var(--accent); font-size: 2.1rem; }
.strip { display: flex; flex-wrap: wrap; gap: .5rem; list-style: none; padding: 0; margin: 1.4rem 0; }
.strip li { flex: 1 1 8rem; border: 1px solid var(--line); border-top: 4px solid var(--line); border-radius: 6px; padding: .5rem .8rem; }
.strip li.ok { border-top-color: var(--accent); }
.strip li.failed, .strip li.died { border-top-color: var(--bad); }
.strip li.interrupted, .strip li.stale, .strip li.running { border-top-color: var(--wait); }
.strip a { color: inherit; font-weight: 600; display: block; }
.strip span { color: var(--soft); font-size: .82rem; }
.chip { display: inline-block; font-size: .75rem; font-weight: 600; padding: .1rem .55rem; border-radius: 99px; vertical-align: .15em;
  margin-left: .6rem;
  background: #eceff3; color: var(--soft); }
.chip.ok { background: #e1f0f9; color: var(--accent); }
.chip.failed, .chip.died { background: #fbe6d9; color: var(--bad); }
.chip.interrupted, .chip.stale, .chip.running { background: #f6edc8; color: #6a5300; }
section { border-top: 1px solid var(--line); margin-top: 2.6rem; padding-top: 1.6rem; }
.error { color: var(--bad); font-weight: 600; }
table { border-collapse: collapse; margin: .7rem 0; font-size: .88rem; max-width: 100%; }
th, td { text-align: left; padding: .32rem .9rem .32rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word; }
.columns td, td .mono { overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; font-size: .8rem; white-space: nowrap; }
thead:not(:has(th:not(:empty))) { display: none; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.changed { font-weight: 600; }
td.word, td.name { white-space: nowrap; }
.word.ok { color: var(--accent); font-weight: 600; }
.word.failed { color: var(--bad); font-weight: 700; }
.scroll { overflow-x: auto; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--soft); font-size: .82rem; }
summary:hover { color: var(--accent); }
details.code { margin: .1rem 0; }
details.code > summary { text-align: right; color: #98a2ae; font-size: .74rem; }
details.code pre, pre { background: var(--ground); border-radius: 6px; padding: .6rem .9rem; margin: .4rem 0; overflow-x: auto;
  line-height: 1.45; }
.output pre { background: none; padding: 0; color: #39424e; white-space: pre-wrap; overflow-wrap: anywhere; }
.output_stderr pre { color: var(--soft); }
.output_error pre { background: #fdf1ea; padding: .6rem .9rem; }
.output { margin: .3rem 0; }
img, svg { max-width: 100%; height: auto; }
figure { margin: 1.6rem 0; text-align: center; }
.cell { margin: .35rem 0; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 0 2.5rem; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; color: var(--soft); font-size: .82rem; }
.ansi-red-fg, .ansi-red-intense-fg { color: var(--bad); } .ansi-green-fg, .ansi-green-intense-fg { color: #1a7f4b; }
.ansi-blue-fg, .ansi-blue-intense-fg, .ansi-cyan-fg, .ansi-cyan-intense-fg { color: var(--accent); }
.ansi-yellow-fg, .ansi-yellow-intense-fg { color: var(--wait); } .ansi-bold { font-weight: 700; }
@media (max-width: 42rem) { body { padding: 1.4rem 1.1rem 3rem; } .columns { grid-template-columns: 1fr; } }
@media print {
  @page { margin: 14mm 13mm; }
  html, body { background: none; } body { max-width: none; padding: 0; font-size: 9pt; line-height: 1.4; }
  h1 { font-size: 17pt; } h2 { font-size: 13pt; } h3 { font-size: 10.5pt; margin-top: .9rem; }
  section { margin-top: 1.2rem; padding-top: .8rem; }
  details.code { display: none; }
  details::details-content { content-visibility: visible; display: block; }
  details { columns: 2; column-gap: 8mm; } details summary { column-span: all; list-style: none; font-weight: 600; }
  table { font-size: 7.6pt; width: 100%; margin: .4rem 0; } th, td { padding: .14rem .6rem .14rem 0; } th { font-size: 7pt; }
  p { max-width: none; } pre { font-size: 7pt; white-space: pre-wrap; overflow-wrap: anywhere; }
  .verdict { margin: .8rem 0; padding: .6rem 1rem; } .strip, .tiles, figure { margin: .7rem 0; }
  .tiles { grid-template-columns: repeat(6, 1fr); } .tile { padding: .4rem .6rem; } .tile dt, .tile dd small { font-size: 6.8pt; }
  .tile dd { font-size: 11pt; } .tile.lead dd { font-size: 16pt; } .strip li { padding: .2rem .5rem; }
  img { max-height: 80mm; }
  .verdict, .tile, .chip, .strip li, .output_error pre { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  section { break-inside: auto; } h2, h3 { break-after: avoid; } figure, img, tr, .tile, .verdict { break-inside: avoid; }
  thead { display: table-header-group; }
  a { color: inherit; }
}
"""
