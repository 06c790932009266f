"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)");
  const hidden = new Set(); // methods switched off in the legend
  let page = JSON.parse($("data").textContent);
  let drawing = Promise.resolve();

  // ---------------------------------------------------------------- tables

  function order(a, b) {
    if (a === "" || b === "") return a === b ? 0 : a === "" ? Infinity : -Infinity; // what is missing stays below
    const d = a - b;
    return Number.isNaN(d) ? a.localeCompare(b, undefined, { numeric: true }) : d;
  }

  function sort(button) {
    const th = button.parentNode;
    const heads = Array.from(th.parentNode.children);
    const at = heads.indexOf(th);
    const now = th.getAttribute("aria-sort");
    const up = now ? now === "descending" : at === 0 || th.dataset.first === "ascending";
    heads.forEach((h) => h.removeAttribute("aria-sort"));
    th.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = th.closest("table").tBodies[0];
    const rows = Array.from(body.rows, (row) => [row.cells[at].dataset.v, row]);
    rows.sort((a, b) => {
      const d = order(a[0], b[0]);
      return up || !Number.isFinite(d) ? d : -d;
    });
    body.append(...rows.map((pair) => pair[1]));
  }

  // One listener for all tables, those that come later too.
  document.addEventListener("click", (event) => {
    const button = event.target.closest("th button");
    if (button) sort(button);
    const chip = event.target.closest(".legend button");
    if (chip) toggle(chip);
  });

  // ---------------------------------------------------------------- figures

  /** Put the present theme's colours in: @ink, @3 (method 3), @3~0.2 (faint). Only where a colour stands: names are text. */
  function themed(value, theme, key = "") {
    if (typeof value === "string" && value[0] === "@" && /color/.test(key)) {
      const [name, alpha] = value.slice(1).split("~");
      const colour = /^\d+$/.test(name) ? theme.colours[+name] : theme[name];
      if (alpha === undefined) return colour;
      const [r, g, b] = [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16));
      return `rgba(${r},${g},${b},${alpha})`;
    }
    if (Array.isArray(value)) return value.map((v) => (typeof v === "number" ? v : themed(v, theme, key)));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, theme, k)]));
    }
    return value;
  }

  async function library() {
    if (window.Plotly) return;
    const place = $("plotly");
    const script = document.createElement("script");
    if (place.dataset.from) {
      const loaded = new Promise((done, failed) => Object.assign(script, { onload: done, onerror: failed }));
      script.src = place.dataset.from;
      document.head.append(script);
      await loaded;
      return;
    }
    const bytes = Uint8Array.from(atob(place.textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    place.remove();
  }

  async function draw() {
    const theme = page.themes[dark.matches ? "dark" : "light"];
    const common = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: theme.soft },
      showlegend: false,
      autosize: true,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: theme.soft, activecolor: theme.ink },
      dragmode: coarse.matches ? false : "zoom", // a finger scrolls the page
      hoverlabel: { bgcolor: theme.card, bordercolor: theme.grid, font: { color: theme.ink } },
    };
    for (const figure of page.figures) {
      const place = $(figure.id);
      if (!place) continue;
      const spec = themed({ data: figure.data, layout: figure.layout }, theme);
      for (const trace of spec.data) if (hidden.has(trace.meta)) trace.visible = false;
      const config = {
        responsive: true,
        displaylogo: false,
        displayModeBar: !coarse.matches,
        modeBarButtons: [["toImage"]], // the others would offer to send the figure away
        toImageButtonOptions: { format: "svg", filename: figure.id },
      };
      await window.Plotly.react(place, spec.data, { ...common, ...spec.layout }, config);
      place.dataset.drawn = "yes";
    }
    document.documentElement.dataset.figures = "drawn";
  }

  /** Draw after whatever is being drawn; figures that fail leave the numbers in place. */
  function redraw() {
    drawing = drawing
      .then(library)
      .then(draw)
      .catch((error) => {
        document.documentElement.dataset.figures = "failed";
        const note = $("no-figures");
        note.hidden = false;
        note.append(` (${error.message || error})`);
      });
    return drawing;
  }

  function toggle(chip) {
    const k = +chip.dataset.k;
    const on = hidden.delete(k);
    if (!on) hidden.add(k);
    chip.setAttribute("aria-pressed", String(on));
    redraw();
  }

  dark.addEventListener("change", redraw);
  redraw();

  // ---------------------------------------------------------------- a run that is still going

  const live = document.documentElement.dataset.live;
  if (live === undefined) return;
  let seen = live;

  async function look() {
    try {
      const answer = await fetch("news?seen=" + encodeURIComponent(seen), { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const news = await answer.json();
      if (news.reload) return void location.reload();
      $("state").textContent = news.state;
      $("state").classList.toggle("lost", false);
      if (news.version !== seen) {
        seen = news.version;
        for (const [id, html] of Object.entries(news.parts)) $(id).innerHTML = html;
        page = news.page;
        await redraw();
        document.documentElement.dataset.live = seen;
      }
    } catch (error) {
      $("state").textContent = "No answer from fedspan watch; trying again.";
      $("state").classList.toggle("lost", true);
    }
    setTimeout(look, 700);
  }
  setTimeout(look, 700);
})();
