"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs, several = runs.length > 1;
  const $ = (id) => document.getElementById(id);
  const LIGHT = ["#1f5fbf", "#c8501e", "#12794a", "#8a3ffc", "#b0851a", "#c2257f", "#007d94", "#6b5344", "#4f7a00", "#6c7480"];
  const DARK = ["#7fb0ff", "#ff9b6a", "#5fd39a", "#c3a0ff", "#e8c04f", "#ff8cc6", "#4fd0e4", "#c9a994", "#a8d95a", "#aab2bf"];
  const STAGES = { "rollouts": 0, "forward and backward passes": 1, "verdicts, rewards, log-probs, the rest": 2, "policy to the engine": 3, "whole step": 9 };
  const MOST_FOUND = 100, MOST_MARKS = 30;
  const shown = new Set(runs.map((_, i) => i));
  const plots = [];  // { node, draw, visible, stale }

  // Everything of a run is a text node: nothing of it is ever parsed as HTML.
  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") node.className = value;
      else if (name === "text") node.textContent = value;
      else if (name in node && typeof value !== "string") node[name] = value;
      else node.setAttribute(name, value);
    }
    for (const child of children) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  // Charts read a little HTML in names; here a name means itself.
  const literal = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const brief = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  const number = (value, digits = 3) => (value === null || value === undefined ? "none" : Number(value.toPrecision(digits)).toString());
  const percent = (value) => (100 * value).toFixed(1);
  const dark = () => document.documentElement.dataset.theme === "dark";
  const colour = (i) => (dark() ? DARK : LIGHT)[i % LIGHT.length];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const faint = (hex, alpha) => `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;

  // Theme.
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  function applyTheme() {
    document.documentElement.dataset.theme = (chosen ?? (wanted.matches ? "dark" : "light"));
    $("theme").textContent = dark() ? "Light" : "Dark";
    for (const node of document.querySelectorAll("[data-of]")) node.style.setProperty("--of", colour(Number(node.dataset.of)));
    redraw();
  }
  $("theme").addEventListener("click", () => { chosen = dark() ? "light" : "dark"; applyTheme(); });
  wanted.addEventListener("change", applyTheme);

  // Charts are drawn as they come into view.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const plot = plots.find((one) => one.node === entry.target);
      plot.visible = entry.isIntersecting;
      if (plot.visible && plot.stale) draw(plot);
    }
  }, { rootMargin: "300px" });
  function addPlot(node, make) {
    const plot = { node, make, visible: false, stale: true };
    plots.push(plot);
    watcher.observe(node);
  }
  function draw(plot) {
    plot.stale = false;
    const { traces, layout = {} } = plot.make();
    const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true, fixedrange: false };
    Plotly.react(plot.node, traces, {
      margin: { l: 44, r: 10, t: 8, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", size: 11.5, color: css("--soft") },
      hovermode: "x unified", hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 }, namelength: 28 },
      showlegend: false, legend: { orientation: "h", y: -0.16, font: { size: 11.5 } }, dragmode: "zoom", ...layout,
      xaxis: { ...axis, rangemode: "tozero", ...(layout.xaxis ?? {}) }, yaxis: { ...axis, ...(layout.yaxis ?? {}) },
    }, { displayModeBar: false, responsive: true, doubleClick: "reset" });
  }
  function redraw() {
    for (const plot of plots) {
      plot.stale = true;
      if (plot.visible) draw(plot);
    }
  }

  // Header.
  $("title").textContent = several ? `${runs.length} runs compared` : runs[0].name;
  runs.forEach((run, i) => {
    const box = element("input", { type: "checkbox", checked: true, "aria-label": `Show ${run.name}` });
    box.addEventListener("change", () => {
      box.checked ? shown.add(i) : shown.delete(i);
      for (const node of document.querySelectorAll(`[data-run="${i}"]`)) node.hidden = !box.checked;
      redraw();
    });
    const chip = element("label", { class: "chip", "data-of": String(i), title: run.path }, several ? box : null, element("span", { class: "dot" }),
      element("span", { text: brief(run.name, runs.length > 4 ? 28 : 60) }), element("span", { class: `state ${run.status}`, text: runs.length > 4 ? run.status : run.state }));
    $("runs").append(chip);
  });

  function table(headings, rows, numeric = true) {
    const head = element("tr", {}, ...headings.map((text, i) => element("th", { scope: "col", class: numeric && i ? "number" : "", text })));
    const body = rows.map((row) => row.part !== undefined
      ? element("tr", { class: "part" }, element("th", { colSpan: headings.length, scope: "colgroup", text: row.part }))
      : element("tr", {}, ...row.map((text, i) => element(i ? "td" : "th", i ? { class: numeric ? "number" : "", text } : { scope: "row", text }))));
    return element("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": headings.join(", ") }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
  }
  function pairs(entries, kind = "") {
    return element("dl", { class: kind }, ...entries.flatMap(([name, value]) => [element("dt", { text: name }), element("dd", { text: value })]));
  }

  // Overview.
  $("overview").append(element("div", { class: several ? "cards" : "cards alone" }, ...runs.map((run, i) => {
    const share = run.planned ? Math.min(1, run.step / run.planned) : null;
    const bar = share === null ? null : element("div", { class: "progress", role: "progressbar", "aria-label": "Steps done", "aria-valuenow": String(Math.round(100 * share)), "aria-valuemin": "0", "aria-valuemax": "100" }, element("i"));
    if (bar) bar.firstChild.style.width = `${100 * share}%`;
    const results = Object.entries(run.outcome).filter(([name]) => name !== "state");
    if (run.alarms.length) results.push(["alarms", String(run.alarms.length)]);
    return element("div", { class: "card", "data-run": String(i), "data-of": String(i) },
      element("div", { class: "top" }, element("span", { class: "dot" }), element("h4", { text: run.name }), element("span", { class: `state ${run.status}`, text: run.state })),
      bar, pairs(results, "numbers"),
      run.notes.length ? element("ul", { class: "notes" }, ...run.notes.map((text) => element("li", { text }))) : null,
      element("details", { class: "card-more" }, element("summary", { text: "What it is" }), pairs([["folder", run.path], ...run.facts])));
  })));
  for (const node of document.querySelectorAll("details.card-more")) node.style.margin = "12px 0 0";

  // Curves.
  function smooth(values, share) {
    const reach = Math.round(values.length * share / 2);
    if (reach < 1) return values;
    const sums = [0];
    for (const value of values) sums.push(sums[sums.length - 1] + value);
    return values.map((_, i) => {
      const low = Math.max(0, i - reach), high = Math.min(values.length, i + reach + 1);
      return (sums[high] - sums[low]) / (high - low);
    });
  }
  const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
  function marks() {
    const found = [...shown].flatMap((i) => runs[i].alarms.map((alarm) => ({ ...alarm, i }))).slice(0, MOST_MARKS);
    return {
      shapes: found.map((alarm) => ({ type: "line", x0: alarm.step, x1: alarm.step, yref: "paper", y0: 0, y1: 1, line: { color: css(alarm.stopped ? "--bad" : "--warn"), width: 1, dash: "dash" } })),
      annotations: found.filter((alarm, k) => found.findIndex((other) => other.step === alarm.step) === k)
        .map((alarm) => ({ x: alarm.step, y: 1, yref: "paper", yanchor: "top", xanchor: "left", text: literal(alarm.code), showarrow: false, font: { size: 9.5, color: css(alarm.stopped ? "--bad" : "--warn") }, textangle: 90 })),
    };
  }
  function curveTraces(panel) {
    const share = Number($("smoothing").value), traces = [], metrics = Object.entries(panel.metrics);
    const active = metrics.filter(([metric], k) => k === 0 || runs.some((run) => run.curves[metric]?.y.some((value) => value !== 0)));
    let lines = 0;
    for (const i of [...shown].sort((a, b) => a - b)) {
      active.forEach(([metric, label], k) => {
        const curve = runs[i].curves[metric];
        if (!curve) return;
        lines += 1;
        const hue = several ? colour(i) : colour(active.length > 1 ? k : i);
        const name = literal(brief(several ? (active.length > 1 ? `${runs[i].name}: ${label}` : runs[i].name) : label, 40));
        const error = runs[i].errors[metric];
        const scored = panel.section === "Scores";
        const line = { color: hue, width: 2, dash: several ? DASHES[k % DASHES.length] : "solid" };
        if (scored) {
          const errors = error ? { type: "data", array: curve.x.map((x) => { const at = error.x.indexOf(x); return at < 0 ? 0 : error.y[at]; }), thickness: 1.2, width: 3, color: hue } : undefined;
          traces.push({ x: curve.x, y: curve.y, name, mode: "lines+markers", line, marker: { size: 6, color: hue }, error_y: errors });
        } else if (share > 0 && curve.y.length > 8) {
          traces.push({ x: curve.x, y: curve.y, name, mode: "lines", line: { color: faint(hue, 0.28), width: 1 }, hoverinfo: "skip", showlegend: false });
          traces.push({ x: curve.x, y: smooth(curve.y, share), name, customdata: curve.y, mode: "lines", line, hovertemplate: "%{customdata:.4~g} (smoothed %{y:.4~g})" });
        } else {
          traces.push({ x: curve.x, y: curve.y, name, mode: curve.y.length > 1 ? "lines" : "markers", line, hovertemplate: "%{y:.4~g}" });
        }
      });
    }
    return { traces, lines };
  }
  function figureOf(panel) {
    const plot = element("div", { class: "plot", role: "img", "aria-label": `${panel.title} over optimizer steps` });
    addPlot(plot, () => {
      const { traces, lines } = curveTraces(panel);
      const legend = lines > shown.size, values = traces.flatMap((trace) => trace.y);
      // Of a share that never changes plotly would show a range of its own.
      const constant = panel.unit.startsWith("share") && new Set(values).size === 1;
      const range = constant ? { range: [-0.02, 1.05] } : { rangemode: values.some((value) => value < 0) ? "normal" : "nonnegative" };
      return { traces, layout: { ...marks(), showlegend: legend && lines < 9, legend: { orientation: "h", y: -0.24, font: { size: 11 } },
        xaxis: { title: { text: "step", standoff: 4, font: { size: 10.5 } } }, yaxis: range } };
    });
    return element("figure", {}, element("figcaption", {}, element("b", { text: panel.title }), element("small", { text: panel.unit })), plot);
  }
  const sections = [...new Set(data.panels.map((panel) => panel.section))];
  for (const name of sections) {
    const panels = data.panels.filter((panel) => panel.section === name);
    const grid = () => element("div", { class: "grid" }, ...panels.map(figureOf));
    if (name === "All others") {
      const more = element("details", {}, element("summary", { text: `All other metrics (${panels.length})` }));
      more.addEventListener("toggle", () => { if (more.open && !more.querySelector(".grid")) more.append(grid()); });
      more.style.marginTop = "16px";
      $("curves").append(more);
    } else {
      (name === "Scores" ? $("scores") : $("curves")).append(element("h3", { text: name === "Scores" ? "Between steps, with standard errors" : name }), grid());
    }
  }
  if (data.thinned) $("curves").append(element("p", { class: "soft", text: `Long curves have ${data.points.toLocaleString("en")} points each: the smallest and the largest value of every stretch of steps.` }));
  $("smoothing").addEventListener("change", redraw);

  // Scores at the end.
  const scored = runs.flatMap((run, i) => run.scores.map((score) => ({ ...score, run, i })));
  if (scored.length) {
    const rows = scored.flatMap((score) => score.policies.map((policy) => [
      several ? `${score.run.name}: ${score.title}` : score.title, policy.who, String(score.n), `avg@${score.k}`,
      percent(policy.value), policy.low === null ? "not known" : `${percent(policy.low)} to ${percent(policy.high)}`,
      policy.pass ? `pass@${policy.pass[0]} ${percent(policy.pass[1])}` : "", percent(policy.majority), number(policy.tokens), percent(policy.truncated),
      policy.who === "adapter" && score.difference ? `${score.difference[0] >= 0 ? "+" : ""}${percent(score.difference[0])} [${percent(score.difference[1])}, ${percent(score.difference[2])}]` : "",
    ]));
    const plot = element("div", { class: "plot" , role: "img", "aria-label": "Scores of base and adapter with 95 % intervals" });
    const many = Math.max(160, 46 * scored.length + 70);
    plot.style.height = `${many}px`;
    addPlot(plot, () => ({
      traces: ["base", "adapter"].map((who) => {
        const found = scored.filter((score) => shown.has(score.i)).flatMap((score) => score.policies.filter((policy) => policy.who === who).map((policy) => ({ ...policy, score })));
        return {
          x: found.map((f) => 100 * f.value), y: found.map((f) => literal(brief(several ? `${f.score.run.name}: ${f.score.task}` : f.score.task, 34))), name: who, mode: "markers", type: "scatter",
          marker: { size: 10, symbol: who === "base" ? "circle-open" : "circle", color: found.map((f) => colour(several ? f.score.i : 0)), line: { width: 2 } },
          error_x: { type: "data", symmetric: false, array: found.map((f) => 100 * ((f.high ?? f.value) - f.value)), arrayminus: found.map((f) => 100 * (f.value - (f.low ?? f.value))), thickness: 1.4, width: 4, color: css("--soft") },
          hovertemplate: `${who} %{x:.1f}<extra></extra>`,
        };
      }).filter((trace) => trace.x.length),
      layout: { hovermode: "closest", showlegend: true, legend: { orientation: "h", y: 1.12, x: 0 }, margin: { l: 44, r: 14, t: 26, b: 34 }, xaxis: { title: { text: "score, percent, with 95 % interval", font: { size: 10.5 }, standoff: 4 }, rangemode: "normal" }, yaxis: { autorange: "reversed", type: "category" } },
    }));
    $("scores").append(element("h3", { text: "At the end, base and adapter" }), element("figure", {}, plot),
      element("p"), table(["task", "policy", "problems", "metric", "score", "95 % interval", "pass", "majority", "tokens", "truncated", "adapter less base"], rows));
  }
  if (!scored.length && !sections.includes("Scores")) $("scores").append(element("p", { class: "soft", text: "Nothing was scored yet." }));

  // Completions.
  const withCompletions = runs.map((run, i) => i).filter((i) => runs[i].completions.length);
  const view = { run: withCompletions[0], at: 0 };
  const texts = (completion) => `${completion.text}`.toLowerCase();
  const kind = (verdict) => (verdict === "right" ? "right" : verdict === "wrong" ? "wrong" : "other");
  const total = (completion) => Object.values(completion.rewards).reduce((sum, value) => sum + (value ?? 0), 0);
  const reward = (completion) => ($("which").value === "" ? total(completion) : completion.rewards[$("which").value] ?? null);
  const gapOf = (completion) => (completion.gaps ? Math.max(...completion.gaps.map((gap) => Math.abs(gap ?? 0))) : -1);
  function options(select, entries) {
    const before = select.value;
    select.replaceChildren(...entries.map(([value, text]) => element("option", { value, text })));
    if (entries.some(([value]) => value === before)) select.value = before;
  }
  function chooseRun() {
    const groups = runs[view.run].completions, all = groups.flatMap((group) => group.prompts.flatMap((prompt) => prompt.completions));
    const verdicts = [...new Set(all.flatMap((completion) => Object.values(completion.verdicts)))].sort();
    options($("verdict"), [["", "any"], ...verdicts.map((verdict) => [verdict, verdict.replaceAll("_", " ")])]);
    const rewards = [...new Set(all.flatMap((completion) => Object.keys(completion.rewards)))];
    options($("which"), [...(rewards.length === 1 ? [] : [["", "sum of all"]]), ...rewards.map((name) => [name, brief(name, 40)])]);
    view.at = Math.min(view.at, groups.length - 1);
    $("step").max = String(groups.length - 1);
    list();
  }
  function matches(completion, prompt) {
    const wanted = $("search").value.toLowerCase(), verdict = $("verdict").value, value = reward(completion);
    const least = $("least").value, most = $("most").value;
    return (!wanted || texts(completion).includes(wanted) || prompt.text.toLowerCase().includes(wanted))
      && (!verdict || Object.values(completion.verdicts).includes(verdict))
      && (least === "" || (value !== null && value >= Number(least))) && (most === "" || (value !== null && value <= Number(most)));
  }
  function marked(text, node) {
    const wanted = $("search").value.toLowerCase();
    let from = 0;
    const lower = text.toLowerCase();
    if (wanted && lower.length === text.length) {
      for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
        node.append(text.slice(from, at), element("mark", { text: text.slice(at, at + wanted.length) }));
        from = at + wanted.length;
      }
    }
    node.append(text.slice(from));
    return node;
  }
  function tokens(completion, largest) {
    const node = element("div", { class: "text", tabIndex: 0 });
    completion.tokens.forEach((token, k) => {
      const gap = completion.gaps[k];
      const span = element("span", { class: "token", text: token, title: gap === null ? "not compared" : `${JSON.stringify(token)}: trainer less engine ${gap > 0 ? "+" : ""}${number(gap)} nats` });
      if (gap !== null && largest > 0) span.style.background = `rgba(var(${gap < 0 ? "--gap-down" : "--gap"}), ${(0.75 * Math.min(1, Math.abs(gap) / largest)).toFixed(3)})`;
      node.append(span);
    });
    return node;
  }
  function card(completion, step, largest) {
    const verdicts = Object.entries(completion.verdicts), worst = verdicts.length ? kind(verdicts[0][1]) : "";
    const tags = element("div", { class: "tags" });
    if (step !== null) tags.append(element("span", { text: `step ${step}` }));
    for (const [name, value] of Object.entries(completion.rewards)) tags.append(element("span", {}, `${brief(name, 40)} `, element("b", { text: number(value) })));
    if (completion.advantage !== null) tags.append(element("span", {}, "advantage ", element("b", { text: number(completion.advantage) })));
    for (const [name, verdict] of verdicts) tags.append(element("span", { class: kind(verdict), text: verdict.replaceAll("_", " "), title: `verdict of ${name}` }));
    for (const [name, answer] of Object.entries(completion.answers)) tags.append(element("span", { title: `answer that ${name} found` }, "answer ", element("b", { text: brief(answer, 60) })));
    if (completion.gaps) tags.append(element("span", {}, "largest gap ", element("b", { text: `${number(gapOf(completion))} nats` })));
    const text = completion.tokens && !$("search").value ? tokens(completion, largest) : marked(completion.text, element("div", { class: "text", tabIndex: 0 }));
    return element("article", { class: `answer ${worst}`, "aria-label": "completion" }, tags, text);
  }
  function list() {
    const run = runs[view.run], groups = run.completions, every = $("every").checked;
    const chosen = every ? groups : [groups[view.at]], order = $("order").value;
    const out = [];
    let found = 0, of = 0;
    const gaps = chosen.flatMap((group) => group.prompts.flatMap((prompt) => prompt.completions.flatMap((c) => (c.gaps ?? []).map((gap) => Math.abs(gap ?? 0)))));
    const largest = gaps.reduce((most, gap) => Math.max(most, gap), 0);
    for (const group of chosen) {
      for (const prompt of group.prompts) {
        of += prompt.completions.length;
        let hits = prompt.completions.filter((completion) => matches(completion, prompt));
        if (!hits.length) continue;
        found += hits.length;
        if (order === "high" || order === "low") hits = [...hits].sort((a, b) => ((reward(b) ?? -Infinity) - (reward(a) ?? -Infinity)) * (order === "high" ? 1 : -1));
        if (order === "gap") hits = [...hits].sort((a, b) => gapOf(b) - gapOf(a));
        const room = MOST_FOUND - out.reduce((sum, [, cards]) => sum + cards.length, 0);
        if (room <= 0) continue;
        out.push([prompt, hits.slice(0, room).map((completion) => card(completion, every ? group.step : null, largest))]);
      }
    }
    $("list").replaceChildren(...out.flatMap(([prompt, cards]) => [
      element("div", { class: "prompt" }, element("small", { text: "prompt" }), marked(prompt.text, element("pre"))), element("div", { class: "answers" }, ...cards)]));
    $("step").value = String(view.at);
    $("step").disabled = every;
    $("step-name").textContent = every ? "all steps" : `step ${groups[view.at].step}`;
    $("step").setAttribute("aria-valuetext", $("step-name").textContent);
    $("previous").disabled = every || view.at === 0;
    $("next").disabled = every || view.at === groups.length - 1;
    const capped = found > MOST_FOUND ? `, the first ${MOST_FOUND} are listed` : "";
    const kept = groups.length < run.completion_steps ? ` This page keeps ${groups.length.toLocaleString("en")} of ${run.completion_steps.toLocaleString("en")} steps, from the first to the last.` : "";
    $("found").replaceChildren(`${found.toLocaleString("en")} of ${of.toLocaleString("en")} completions${capped}.${kept}`,
      ...(largest > 0 ? [" Tokens are coloured by log-prob of trainer less engine: ", element("span", { class: "key" }, `-${number(largest, 2)}`, element("i"), `+${number(largest, 2)} nats`)] : []));
  }
  function move(by) {
    const last = runs[view.run].completions.length - 1, to = Math.min(last, Math.max(0, view.at + by));
    if (to !== view.at && !$("every").checked) { view.at = to; list(); }
  }
  if (withCompletions.length) {
    options($("run"), withCompletions.map((i) => [String(i), brief(runs[i].name, 60)]));
    $("of-run").hidden = withCompletions.length === 1;
    $("run").addEventListener("change", () => { view.run = Number($("run").value); chooseRun(); });
    for (const id of ["search", "verdict", "which", "least", "most", "order", "every"]) $(id).addEventListener("input", list);
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    $("step").addEventListener("input", () => { view.at = Number($("step").value); list(); });
    $("previous").addEventListener("click", () => move(-1));
    $("next").addEventListener("click", () => move(1));
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
      if (event.key === "ArrowLeft") move(-1);
      else if (event.key === "ArrowRight") move(1);
      else if (event.key === "/") { event.preventDefault(); $("search").focus(); }
      else return;
    });
    view.at = runs[view.run].completions.length - 1;
    chooseRun();
  } else {
    for (const id of ["controls", "steps", "found"]) $(id).hidden = true;
    $("completions").append(element("p", { class: "soft", text: "No completions are logged (samples.jsonl)." }));
  }

  // Timings.
  const timed = runs.map((run, i) => [run, i]).filter(([run]) => Object.keys(run.stages).length);
  if (timed.length) {
    const grid = element("div", { class: "grid" });
    const names = [...new Set(timed.flatMap(([run]) => Object.keys(run.stages)))];
    if (several) {
      const plot = element("div", { class: "plot tall", role: "img", "aria-label": "Seconds of a mean step by stage, each run" });
      addPlot(plot, () => {
        const found = timed.filter(([, i]) => shown.has(i));
        return {
          traces: names.map((name, k) => ({ type: "bar", orientation: "h", name, y: found.map(([run]) => literal(brief(run.name, 30))), x: found.map(([run]) => run.stage_means[name] ?? 0), marker: { color: colour(STAGES[name] ?? k) }, hovertemplate: "%{x:.3~g} s" })),
          layout: { barmode: "stack", hovermode: "y unified", showlegend: true, legend: { orientation: "h", y: -0.2 }, xaxis: { title: { text: "seconds of a mean step", font: { size: 10.5 }, standoff: 4 } }, yaxis: { autorange: "reversed", type: "category" } },
        };
      });
      grid.append(element("figure", {}, element("figcaption", {}, element("b", { text: "A mean step" }), element("small", { text: "without the first" })), plot));
    }
    for (const [run, i] of timed) {
      const plot = element("div", { class: "plot tall", role: "img", "aria-label": `Seconds of each step by stage: ${run.name}` });
      addPlot(plot, () => ({
        traces: Object.entries(run.stages).map(([name, curve], k) => ({ x: curve.x, y: curve.y, name, stackgroup: "one", mode: "lines", line: { width: 0.5, color: colour(STAGES[name] ?? k) }, fillcolor: faint(colour(STAGES[name] ?? k), 0.55), hovertemplate: "%{y:.3~g} s" })),
        layout: { showlegend: true, legend: { orientation: "h", y: -0.2 }, xaxis: { title: { text: "step", font: { size: 10.5 }, standoff: 4 } } },
      }));
      grid.append(element("figure", { "data-run": String(i) }, element("figcaption", {}, element("b", { text: several ? run.name : "Seconds of each step" }), element("small", { text: "seconds by stage" })), plot));
    }
    $("timings").append(grid);
    const rows = timed.map(([run]) => [run.name, ...names.map((name) => (name in run.stage_means ? `${number(run.stage_means[name])} s` : "")), `${number(Object.values(run.stage_means).reduce((a, b) => a + b, 0))} s`]);
    $("timings").append(element("p"), table(["a mean step", ...names, "all"], rows));
  } else {
    $("timings").append(element("p", { class: "soft", text: "No times are logged (step_time)." }));
  }

  // Alarms.
  const raised = runs.flatMap((run, i) => run.alarms.map((alarm) => ({ alarm, run, i })));
  if (raised.length) {
    $("alarms").append(element("div", { class: "cards" }, ...raised.map(({ alarm, run, i }) => element("div", { class: `card alarm${alarm.stopped ? " stopped" : ""}`, "data-run": String(i) },
      element("div", { class: "top" }, element("code", { text: alarm.code }), element("h4", { text: alarm.name }), element("small", { text: `${several ? `${run.name}, ` : ""}step ${alarm.step}${alarm.stopped ? ", stopped the run" : ""}` })),
      element("p", { text: alarm.line }),
      alarm.explained
        ? element("details", {}, element("summary", { text: alarm.explained[0] }), ...alarm.explained.slice(1).map((text) => element("p", { text })))
        : element("p", { class: "soft" }, "`perl explain` does not know this code.")))));
  } else {
    $("alarms").append(element("p", { class: "soft", text: "None was raised." }));
  }

  // What differs.
  if (several) {
    const rows = data.differences.flatMap((part) => [{ part: part.title }, ...part.rows.map((row) => [row.label, ...row.values])]);
    $("differences").append(rows.length ? table(["", ...runs.map((run) => run.name)], rows, false) : element("p", { class: "soft", text: "Nothing." }));
  } else {
    $("differences").hidden = true;
  }

  // Recipe and plan.
  runs.forEach((run, i) => {
    const box = element("div", { "data-run": String(i) });
    if (several) box.append(element("h3", { text: run.name }));
    const plan = element("details", { open: !several }, element("summary", { text: "Plan" }));
    plan.append(run.plan.lines.length ? element("pre", { text: run.plan.lines.join("\n") }) : element("p", { class: "soft", text: run.plan.note }));
    if (run.settings.length) plan.append(pairs(run.settings));
    const recipe = element("details", {}, element("summary", { text: "Recipe" }), run.recipe === null ? element("p", { class: "soft", text: "There is no recipe.yaml in this folder." }) : element("pre", { tabIndex: 0, text: run.recipe }));
    box.append(plan, recipe);
    $("settings").append(box);
  });

  for (const section of document.querySelectorAll("main > section:not([hidden])")) $("contents").append(element("a", { href: `#${section.id}`, text: section.querySelector("h2").textContent }));
  $("footer").textContent = `Made ${data.made} by perl-rl ${data.version}. While a run trains, the same command makes this page anew.`;
  applyTheme();
  document.documentElement.dataset.ready = "yes";
})();
