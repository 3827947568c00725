"use strict";
// Draws the figures in the page's colours, and again when these change.
(() => {
  const state = document.getElementById("state");
  const figures = JSON.parse(document.getElementById("figures").textContent);

  // plotly.js is packed, which makes the page a third as large.
  async function library() {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (char) => char.charCodeAt(0));
    const stream = new Response(bytes).body.pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    return window.Plotly;
  }

  const merged = (under, over) => {
    const all = { ...under };
    for (const [name, value] of Object.entries(over)) {
      const both = value && all[name] && typeof value === "object" && !Array.isArray(value);
      all[name] = both ? merged(all[name], value) : value;
    }
    return all;
  };

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line"),
      automargin: true, tickfont: { size: 12 }, title: { font: { size: 13 } },
    };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--text"), family: style.fontFamily, size: 13 },
      margin: { l: 56, r: 12, t: 12, b: 48 },
      xaxis: axis, yaxis: axis,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", xanchor: "left" },
      hoverlabel: {
        align: "left", bgcolor: colour("--panel"), bordercolor: colour("--line"),
        font: { color: colour("--text"), size: 12 },
      },
      modebar: { color: colour("--dim"), activecolor: colour("--text"), bgcolor: "rgba(0,0,0,0)" },
    };
  }

  const config = {
    responsive: true, displaylogo: false, displayModeBar: false, showTips: false,
    doubleClick: "reset+autosize",
  };
  const place = (index) => document.getElementById(`f${index}`);

  // On a narrow screen a legend takes a line for each name.
  const NARROW_PIXELS = 480, NAME_PIXELS = 19;
  const heightOf = ({ height, data }, width) =>
    height + (width < NARROW_PIXELS ? NAME_PIXELS * data.length : 0);

  function draw(plotly) {
    return Promise.all(figures.map((figure, index) => {
      const height = heightOf(figure, place(index).clientWidth);
      const layout = merged(theme(), { ...figure.layout, height, showlegend: true });
      return plotly.react(place(index), figure.data, structuredClone(layout), config);
    }));
  }

  // The range of a time line, moved by parts of its width: the keyboard's way to look closer.
  function moved(element, { zoom = 1, shift = 0 }) {
    const [begin, end] = element._fullLayout.xaxis.range;
    const middle = (begin + end) / 2 + shift * (end - begin);
    const half = (zoom * (end - begin)) / 2;
    return { "xaxis.range": [middle - half, middle + half] };
  }

  function press(plotly, button) {
    const { figure, button: which } = button.dataset;
    const change = figures[figure].buttons[which];
    const element = place(figure);
    if ("zoom" in change || "shift" in change) {
      plotly.relayout(element, moved(element, change));
      return;
    }
    plotly.relayout(element, structuredClone(change));
    for (const each of button.parentElement.children) {
      each.setAttribute("aria-pressed", String(each === button));
    }
  }

  async function start() {
    const plotly = figures.length ? await library() : null;
    if (plotly) {
      await draw(plotly);
      for (const button of document.querySelectorAll("button[data-figure]")) {
        button.addEventListener("click", () => press(plotly, button));
      }
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(plotly));
    }
    state.textContent = "";
    document.documentElement.dataset.drawn = String(figures.length);
  }

  start().catch((error) => {
    state.textContent = `The figures could not be drawn (${error}); their tables have the values.`;
    console.error(error);
  });
})();
