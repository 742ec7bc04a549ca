"use strict";
// Everything can be read without this script: it filters galleries by class, and writes decisions down as CSV.
for (const control of document.querySelectorAll(".js")) control.hidden = false;

for (const gallery of document.querySelectorAll("[data-gallery]")) {
  const select = gallery.querySelector("select");
  const items = [...gallery.querySelectorAll("li")];
  const more = gallery.querySelector(".more");
  let most = window.innerWidth < 600 ? 18 : 45; // so that what follows is not screens away
  const show = () => {
    const wanted = items.filter((item) => !select?.value || item.dataset.class === select.value);
    const shown = new Set(select?.value ? wanted : wanted.slice(0, most));
    for (const item of items) item.hidden = !shown.has(item);
    more.hidden = shown.size === wanted.length;
    gallery.querySelector("output").textContent = `${shown.size} of ${items.length} ${gallery.dataset.noun} shown`;
  };
  select?.addEventListener("change", show);
  more.querySelector("button").addEventListener("click", () => {
    const next = items[most];
    most = items.length;
    show();
    next.tabIndex = -1;
    next.focus(); // the button is gone: continue at the first new item
  });
  show();
}

const review = document.querySelector("[data-review]");
if (review) {
  const buttons = [...review.querySelectorAll("[data-decision]")];
  const download = review.querySelector("[data-download]");
  const isPressed = (button) => button.getAttribute("aria-pressed") === "true";
  const tell = () => {
    const chosen = buttons.filter(isPressed).map((button) => button.dataset.decision);
    const n = (word) => chosen.filter((one) => one === word).length;
    download.disabled = chosen.length === 0;
    download.parentElement.classList.toggle("active", chosen.length > 0);
    review.querySelector("[data-changes]").textContent = `${n("drop")} to drop, ${n("add")} to add`;
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(!isPressed(button)));
      button.closest("li").classList.toggle("decided", isPressed(button));
      tell();
    });
  }
  // what a spreadsheet would take for a formula begins with a quote, as in `salcli review`
  const cell = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? "'" : "") + text.replaceAll('"', '""')}"`;
  download.addEventListener("click", () => {
    const lines = ["ood,seed,filter,index,file,score,predicted,decision"];
    for (const button of buttons) {
      const { index, score, predicted } = button.closest("li").dataset;
      const word = isPressed(button) ? button.dataset.decision : button.dataset.decision === "drop" ? "keep" : "";
      const { ood, seed, filter } = review.dataset;
      lines.push([cell(ood), seed, filter, index, "", score, cell(predicted), word].join(","));
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
    link.download = "review.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
}
