"use strict";
(() => {
  const source = JSON.parse(document.getElementById("rows").textContent);
  const columns = source.columns;
  const table = document.getElementById("results");
  const head = table.tHead.rows[0];
  const body = table.tBodies[0];
  const position = document.getElementById("position");
  const [previous, next] = [document.getElementById("previous"), document.getElementById("next")];
  const text = document.getElementById("search");
  const selects = [...document.querySelectorAll("select[data-column]")];
  const PAGE = 50;
  let page = 0, sortBy = -1, descending = false, shown = [];

  const significant = (value, digits) => {
    if (value !== 0 && (Math.abs(value) < 1e-5 || Math.abs(value) >= 1e7)) return value.toExponential(digits - 1);
    const magnitude = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
    const decimals = Math.min(12, Math.max(0, digits - 1 - magnitude));
    return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  };
  const time = (seconds) => {
    for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
      if (seconds >= size || unit === "µs") return `${significant(seconds / size, 4)} ${unit}`;
  };
  const formats = {
    number: (value) => String(value),
    decimal: (value) => significant(value, 4),
    time,
    percent: (value) => `${(100 * value).toFixed(value < 0.0995 ? 2 : 1)}%`,
    ratio: (value) => `${significant(value, 4)}×`,
    exponent: (value) => value.toExponential(1),
  };
  const raw = (column, row) => (column.kind === "text" ? column.words[column.codes[row]] : column.data[row]);
  const display = (column, row) => {
    const value = raw(column, row);
    if (column.kind === "text") return value;
    if (column.kind === "range") {
      const high = column.high[row];
      if (value !== null && high !== null) return `${significant(value, 3)} – ${significant(high, 3)}`;
      return column.words[column.codes[row]];
    }
    return value === null ? "" : formats[column.kind](value);
  };

  const words = columns.filter((column) => column.kind === "text");
  let haystack = null;
  const searchable = (row) => {
    haystack ??= Array.from({ length: source.rows }, (_, r) =>
      words.map((column) => raw(column, r)).concat(
        columns.filter((column) => column.kind === "number").map((column) => `${column.label}=${raw(column, r)}`)
      ).join(" ").toLowerCase());
    return haystack[row];
  };

  const select = () => {
    const wanted = selects.filter((box) => box.value).map((box) => {
      const column = columns.find((candidate) => candidate.key === box.dataset.column);
      return [column.codes, column.words.indexOf(box.value)];
    });
    const terms = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = [];
    for (let row = 0; row < source.rows; row++) {
      if (!wanted.every(([codes, code]) => codes[row] === code)) continue;
      if (terms.length && !terms.every((term) => searchable(row).includes(term))) continue;
      shown.push(row);
    }
    if (sortBy >= 0) {
      const column = columns[sortBy];
      const sign = descending ? -1 : 1;
      const missing = (value) => value === null || value === "";
      shown.sort((a, b) => {
        const [x, y] = [raw(column, a), raw(column, b)];
        if (missing(x) || missing(y)) return missing(x) - missing(y) || a - b;
        return sign * (column.kind === "text" ? x.localeCompare(y, "en", { numeric: true }) : x - y) || a - b;
      });
    }
    page = 0;
    draw();
  };

  const draw = (size = PAGE) => {
    const pages = Math.max(1, Math.ceil(shown.length / size));
    page = Math.min(page, pages - 1);
    const rows = shown.slice(page * size, (page + 1) * size);
    body.replaceChildren(...rows.map((row) => {
      const line = document.createElement("tr");
      for (const column of columns) {
        const cell = document.createElement("td");
        const content = display(column, row);
        cell.textContent = content === "" && column.kind !== "text" ? "–" : content;
        if (column.kind !== "text") cell.className = "num";
        if (column.kind === "range" && raw(column, row) === null) cell.className = "note";
        if (column.key === "provider" && content in source.styles) cell.style.color = `var(--s${source.styles[content]})`;
        if (column.key === "status") cell.className = `status ${content}`;
        if (column.key === "reason") cell.className = "reason";
        line.append(cell);
      }
      return line;
    }));
    const count = (value) => value.toLocaleString("en");
    position.textContent = shown.length
      ? `Rows ${count(page * size + 1)} to ${count(page * size + rows.length)} of ${count(shown.length)}` +
        (shown.length < source.rows ? ` (filtered from ${count(source.rows)})` : "")
      : `No row matches (of ${count(source.rows)})`;
    previous.disabled = page === 0;
    next.disabled = page >= pages - 1;
  };

  columns.forEach((column, index) => {
    const cell = document.createElement("th");
    cell.scope = "col";
    if (column.kind !== "text") cell.className = "num";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = column.label;
    if (column.title) button.title = column.title;
    button.addEventListener("click", () => {
      // Third click: back to the order of measurement.
      if (sortBy !== index) [sortBy, descending] = [index, false];
      else if (!descending) descending = true;
      else sortBy = -1;
      [...head.cells].forEach((other, at) =>
        at === sortBy ? other.setAttribute("aria-sort", descending ? "descending" : "ascending")
          : other.removeAttribute("aria-sort"));
      select();
    });
    cell.append(button);
    head.append(cell);
  });
  for (const box of selects) {
    const column = columns.find((candidate) => candidate.key === box.dataset.column);
    for (const word of column.words) box.add(new Option(word, word));
    box.addEventListener("change", select);
  }
  text.addEventListener("input", select);
  document.getElementById("reset").addEventListener("click", () => {
    text.value = "";
    for (const box of selects) box.value = "";
    select();
  });
  previous.addEventListener("click", () => { page--; draw(); });
  next.addEventListener("click", () => { page++; draw(); });

  // On paper nothing can be opened and no page turned.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const element of closed) element.open = true;
    page = 0;
    draw(1000);
  });
  addEventListener("afterprint", () => {
    for (const element of closed) element.open = false;
    draw();
  });
  select();
})();
