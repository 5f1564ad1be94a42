"""How a report looks, on a screen in light or dark and on paper."""

_LIGHT = (
    "--ground:#fff;--text:#1c2126;--soft:#535c66;--edge:#d9dedb;--h0:#1d5bc4;--h1:#b3541e;--h2:#197a4b;--h3:#8b3fa8;"
    "--h4:#0c7c8c;--h5:#ad2f5b;--h6:#6d6a12;--h7:#4b5563;color-scheme:light"
)
_DARK = (
    "--ground:#101316;--text:#e7eaec;--soft:#a4aeb8;--edge:#2e363d;--h0:#7fb0ff;--h1:#f0a06a;--h2:#63cf94;--h3:#d295ec;"
    "--h4:#5ccadb;--h5:#f58cb0;--h6:#d3cd5c;--h7:#b3bcc6;color-scheme:dark"
)
STYLE = (
    f":root{{{_LIGHT}}}@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    "body{margin:0;background:var(--ground);color:var(--text);font:15px/1.5 system-ui,sans-serif}"
    "main,footer{max-width:1100px;margin:0 auto;padding:1em 20px}h1{margin:.5em 0 0}h2{font-size:19px;margin:1.8em 0 .5em}"
    "footer,.note,figcaption{color:var(--soft)}figcaption{font-weight:600;margin-bottom:4px}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:18px}figure{margin:0}"
    "svg{width:100%;height:auto;display:block}.grid line{stroke:var(--edge)}.grid text{fill:var(--soft);font-size:11.5px}"
    ".line{fill:none;stroke:var(--hue);stroke-width:2;stroke-linejoin:round}"
    + "".join(f".hue-{number}{{--hue:var(--h{number})}}" for number in range(8))
    + ".dash-1{stroke-dasharray:7 4}.dash-2{stroke-dasharray:2 4}.dash-3{stroke-dasharray:10 3 2 3}"
    ".legend{list-style:none;display:flex;flex-wrap:wrap;gap:0 16px;padding:0;margin:6px 0;font-size:13px}"
    ".legend i{display:inline-block;width:18px;border-top:3px solid var(--hue);vertical-align:middle;margin-right:6px}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto;max-width:100%}"
    "th,td{padding:.3em .9em;border-bottom:1px solid var(--edge);text-align:right;white-space:nowrap;unicode-bidi:isolate}"
    "th{color:var(--soft);font-weight:600;font-size:13px}td:first-child,th:first-child{text-align:left;padding-left:0}"
    "td:nth-child(2):not(:last-child),td:last-child{white-space:normal}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}summary{cursor:pointer}"
    "@media print{details pre{font-size:10px}}"
)
"""Text in both themes has a contrast of 4.5:1 or more."""
