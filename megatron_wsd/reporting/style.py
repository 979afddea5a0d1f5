"""The style sheet of a run's page: light and dark, and nothing fetched from anywhere."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1f24; --muted: #59636e; --grid: #dde2e7; --panel: #f5f7f9; --line: #d5dae0;
  --shade: rgb(0 0 0 / .25);
  --bad: #c0232c; --good: #1a7f4b; --link: #0a5fb4;
  --phase-warmup: #fdf1d9; --phase-stable: #eaf4ea; --phase-decay: #e7ecfa; --phase-done: #f0f0f0;
  --series-0: #0a5fb4; --series-1: #c4560a; --series-2: #1a7f4b; --series-3: #7a3fa8;
  --series-4: #7d4a2d; --series-5: #00798c; --series-6: #7a7a00; --series-7: #b83280;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --ink: #e8eaed; --muted: #a2abb5; --grid: #2c3238; --panel: #1c2024; --line: #343b42;
    --shade: rgb(255 255 255 / .3);
    --bad: #ff7b78; --good: #67d39b; --link: #6cb2ff;
    --phase-warmup: #2e2716; --phase-stable: #18291c; --phase-decay: #1c2338; --phase-done: #23262a;
    --series-0: #6cb2ff; --series-1: #ffab5e; --series-2: #67d39b; --series-3: #c9a0f2;
    --series-4: #d6a283; --series-5: #5fd0de; --series-6: #d6d65a; --series-7: #f48bc0;
  }
}
@media print { :root { color-scheme: light; } figure, table { break-inside: avoid; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 var(--font); }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 3rem 0 .6rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { max-width: 44rem; margin: .5rem 0; }
.lead { color: var(--muted); max-width: none; margin-bottom: 1.5rem; }
.note { color: var(--muted); font-size: .9rem; }
nav { font-size: .9rem; margin: 1.5rem 0 0; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
a { color: var(--link); }
dl.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem;
  margin: 0; }
@media (max-width: 32rem) { dl.tiles { grid-template-columns: 1fr 1fr; } }
dl.tiles div { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem;
  padding: .7rem .9rem; }
dl.tiles dt { color: var(--muted); font-size: .8rem; }
dl.tiles dd { margin: .1rem 0 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; }
dl.tiles dd small { display: block; font-size: .78rem; font-weight: 400; color: var(--muted); }
figure { margin: 1rem 0; }
figcaption { color: var(--muted); font-size: .9rem; max-width: 44rem; }
/* What is wider than the window is scrolled, and shaded at an edge behind which there is more. */
.wide { overflow-x: auto; background:
  linear-gradient(to right, var(--paper) 40%, transparent) left / 2.5rem 100% no-repeat local,
  linear-gradient(to left, var(--paper) 40%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / .8rem 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / .8rem 100% no-repeat scroll; }
.wide svg { display: block; width: 100%; min-width: 42rem; height: auto; }
svg text { font-family: var(--font) !important; }
table { border-collapse: collapse; font-size: .9rem; margin: .8rem 0; min-width: 50%; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--muted); font-weight: 600; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.short { white-space: nowrap; }
td.long { min-width: 18rem; }
.bar { display: inline-block; width: 8rem; height: .7rem; background: var(--series-1); border-radius: .2rem;
  overflow: hidden; vertical-align: baseline; margin-right: .6rem; }
.bar span { display: block; height: 100%; background: var(--series-0); }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  font-size: .85rem; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: 1rem;
  overflow-x: auto; }
ul.tree, ul.tree ul { list-style: none; padding-left: 1.2rem; margin: .2rem 0;
  border-left: 1px solid var(--line); }
ul.tree { padding-left: 0; border-left: 0; }
.here { font-weight: 600; }
.warning { max-width: none; border: 1px solid var(--bad); border-left-width: .4rem; border-radius: .5rem;
  padding: .7rem .9rem; margin: 1rem 0; }
.warning strong { color: var(--bad); }
details { margin: .5rem 0; }
summary { cursor: pointer; font-size: .9rem; color: var(--link); }
.bad { color: var(--bad); }
"""
