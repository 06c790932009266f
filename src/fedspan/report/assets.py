"""The page's style sheet and its one script. Nothing is fetched from anywhere."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#1b1f24;--soft:#57606a;--line:#dfe3e8;--accent:#0b5cad;
--good:#0a6b45;--tint:#eef4fb;--warn:#fff6e0;--warnline:#e0b04a}
@media (prefers-color-scheme:dark){:root{--bg:#101418;--card:#181d23;--ink:#e8ebef;--soft:#a3acb8;--line:#2c343d;
--accent:#7db8f5;--good:#63d3a4;--tint:#1b2733;--warn:#2b2412;--warnline:#8a6a1f}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:2.2rem 1.2rem 3rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .5rem;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.6rem 0 .8rem;letter-spacing:-.005em}
h3{font-size:1rem;margin:0 0 .2rem}
p{margin:.5rem 0}
.facts{display:flex;flex-wrap:wrap;gap:.4rem;margin:0;padding:0;list-style:none}
.facts li{background:var(--card);border:1px solid var(--line);border-radius:99px;padding:.08rem .7rem;font-size:.85rem;
color:var(--soft);overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:.9rem;margin:1.4rem 0 1rem}
.cards div,.box,figure{background:var(--card);border:1px solid var(--line);border-radius:12px}
.cards div{padding:.8rem 1.1rem 1rem}
.cards dt{font-size:.82rem;color:var(--soft)}
.cards dd{margin:0;overflow-wrap:anywhere}
.cards .n{font-size:1.75rem;font-weight:650;line-height:1.25;font-variant-numeric:tabular-nums;letter-spacing:-.02em}
.cards .who{font-weight:600;color:var(--accent)}
.says{background:var(--tint);border-radius:12px;padding:.9rem 1.2rem;max-width:none}
.says ul{margin:0;padding-left:1.1rem}
.says li{margin:.25rem 0}
.note{background:var(--warn);border-left:4px solid var(--warnline);border-radius:6px;padding:.6rem 1rem}
.box{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
caption{caption-side:bottom;text-align:left;color:var(--soft);font-size:.82rem;padding:.6rem 1rem .8rem}
caption span{display:block;position:sticky;left:1rem;max-width:calc(100vw - 4.5rem)}
th,td{padding:.5rem .9rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{vertical-align:bottom}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
thead th{font-weight:600;color:var(--soft);font-size:.82rem;white-space:normal;min-width:5.2rem}
tbody th{font-weight:600;white-space:normal;min-width:8.5rem;overflow-wrap:anywhere}
th button{all:unset;cursor:pointer;display:inline-block}
th button:hover{color:var(--ink)}
th button:focus-visible,summary:focus-visible,.box:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
th button::after{content:"\\00a0\\2195";opacity:.45}
th[aria-sort=ascending] button::after{content:"\\00a0\\2191";opacity:1}
th[aria-sort=descending] button::after{content:"\\00a0\\2193";opacity:1}
td.best{color:var(--good);font-weight:700}
.dot{display:inline-block;width:.72em;height:.72em;border-radius:50%;margin-right:.5em;border:1px solid #fff6}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr));gap:1rem}
.figures.wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,640px),1fr))}
figure{margin:0;padding:1rem 1rem .8rem;background:#fff;color:#1b1f24;border-color:var(--line);min-width:0}
figure svg{display:block;width:100%;height:auto}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figcaption{margin-bottom:.7rem}
figcaption p{font-size:.84rem;color:#57606a;margin:0}
details{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:.5rem 0}
details .box{border:0;border-top:1px solid var(--line);border-radius:0 0 10px 10px}
details table{width:auto;min-width:min(100%,36rem)}
summary{cursor:pointer;padding:.6rem 1rem}
summary small{color:var(--soft);font-size:.85rem}
pre{margin:0;padding:.9rem 1.1rem;overflow-x:auto;font-size:.86rem;line-height:1.5;border-top:1px solid var(--line)}
pre,code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
code{font-size:.9em;white-space:nowrap}
.command{background:var(--card);border:1px solid var(--line);border-radius:10px}
footer{margin-top:2.4rem;color:var(--soft);font-size:.85rem}
@media (max-width:560px){main{padding:1.4rem .8rem 2rem}h1{font-size:1.5rem}.cards{grid-template-columns:1fr;gap:.6rem}
.says{padding:.7rem .9rem}figure{padding:.8rem .5rem .5rem}figcaption{padding:0 .4rem}th,td{padding:.45rem .65rem}
tbody th{min-width:7.8rem}}
@media print{body{background:#fff}details{break-inside:avoid}figure{break-inside:avoid}}
"""

SCRIPT = """
document.querySelectorAll("th button").forEach(function (button) {
  button.addEventListener("click", function () {
    var th = button.parentNode, heads = Array.from(th.parentNode.children), at = heads.indexOf(th);
    var up = th.getAttribute("aria-sort") === "descending" || (!th.hasAttribute("aria-sort") && at === 0);
    heads.forEach(function (h) { h.removeAttribute("aria-sort"); });
    th.setAttribute("aria-sort", up ? "ascending" : "descending");
    var body = th.closest("table").tBodies[0];
    Array.from(body.rows).sort(function (a, b) {
      var x = a.cells[at].dataset.v, y = b.cells[at].dataset.v;
      if (x === "" || y === "") return (x === "") - (y === "");
      var d = at === 0 ? x.localeCompare(y, undefined, {numeric: true}) : x - y;
      return up ? d : -d;
    }).forEach(function (row) { body.appendChild(row); });
  });
});
"""
