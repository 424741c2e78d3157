// Draws every chart from the table behind it, hides and shows runs, sorts the summary, and switches the theme.
(async () => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const root = document.documentElement, hidden = new Set(), views = [];

  const rowsOf = table => {
    const heads = [...table.tHead.rows[0].cells].map(head => [head.dataset.field, head.className === "n"]);
    return [...table.tBodies[0].rows].map(row => Object.fromEntries(heads.map(([field, numeric], at) => {
      const text = row.cells[at].textContent.trim();
      return [field, numeric ? (text === "" ? null : Number(text)) : text];
    })));
  };
  for (const table of all("table"))
    [...table.tHead.rows[0].cells].forEach((head, at) => {
      if (head.className === "n") for (const row of table.tBodies[0].rows) row.cells[at].className = "n";
    });

  const theme = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  const showTheme = () => theme.setAttribute("aria-pressed", dark());
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; showTheme(); });
  system.addEventListener("change", showTheme);
  showTheme();

  for (const button of all("button.run")) button.addEventListener("click", () => {
    const run = button.dataset.run, show = hidden.delete(run);
    if (!show) hidden.add(run);
    button.setAttribute("aria-pressed", show);
    for (const article of all("article[data-run]")) article.hidden = hidden.has(article.dataset.run);
    for (const view of views) try { view.signal("hidden", [...hidden]).run(); } catch { /* a chart of one run */ }
  });

  for (const head of all("table.summary th")) head.addEventListener("click", () => {
    const table = head.closest("table"), at = head.cellIndex, numeric = head.className === "n";
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const value = row => row.cells[at].textContent.trim();
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => {
      if (value(a) === "" || value(b) === "") return (value(a) === "") - (value(b) === "");
      return sign * (numeric ? value(a) - value(b) : value(a).localeCompare(value(b)));
    }));
  });

  const line = { gridColor: "var(--grid)", domainColor: "var(--line)", tickColor: "var(--line)" };
  const label = { labelColor: "var(--muted)", titleColor: "var(--muted)", titleFontWeight: "normal" };
  const config = { background: null, font: "system-ui, sans-serif", view: { stroke: null }, axis: { ...line, ...label, titlePadding: 8 },
    legend: { ...label, labelColor: "var(--ink)" }, axisX: { grid: false }, axisY: { tickCount: 5 } };
  const eventTable = document.querySelector("table.events"), events = eventTable ? rowsOf(eventTable) : [];
  for (const script of all("script.spec")) {
    const spec = JSON.parse(script.textContent), article = script.closest("article");
    const datasets = { table: rowsOf(article.querySelector("table")), events: events.filter(event => event.step !== null) };
    const found = await vegaEmbed(article.querySelector(".chart"), { ...spec, datasets },
      { mode: "vega-lite", renderer: "svg", actions: false, ast: true, config, tooltip: { theme: "custom" } });
    views.push(found.view.logLevel(vega.Error)); // a chart whose runs are all hidden has no extent
  }
  root.dataset.drawn = views.length;
})();
