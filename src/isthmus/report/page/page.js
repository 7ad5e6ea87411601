"use strict";
// Tooltips, the switch between light and dark, and the copy button. Text is only ever set as text.

const byId = (id) => document.getElementById(id);

const tooltip = (() => {
  const box = byId("tip");
  const show = (text, x, y) => {
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), innerWidth - width - 8);
    const below = y + 18 + height < innerHeight;
    box.style.transform = `translate(${left}px, ${below ? y + 18 : Math.max(8, y - height - 12)}px)`;
  };
  const hide = () => { box.hidden = true; };
  document.addEventListener("pointermove", (event) => {
    const holder = event.target.closest?.("[data-tip]");
    if (holder) show(holder.dataset.tip, event.clientX, event.clientY);
    else if (event.target.id !== "chart" && event.target.id !== "overview") hide();
  });
  document.addEventListener("focusin", (event) => {
    const holder = event.target.closest?.("[data-tip]");
    if (!holder || !holder.matches(":focus-visible")) return;
    const place = holder.getBoundingClientRect();
    show(holder.dataset.tip, place.left + place.width / 2, place.top + place.height / 2);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  return { show, hide };
})();

const onTheme = [];
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.style.colorScheme ? root.style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.style.colorScheme = dark ? "light" : "dark";
  byId("theme").setAttribute("aria-pressed", String(!dark));
  onTheme.forEach((redraw) => redraw());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => onTheme.forEach((redraw) => redraw()));

byId("copy").addEventListener("click", async () => {
  const text = byId("plan-text");
  try {
    await navigator.clipboard.writeText(text.textContent);
    byId("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(text); // no clipboard here: at least it is chosen
    byId("copy").textContent = "Press Ctrl+C";
  }
  setTimeout(() => { byId("copy").textContent = "Copy"; }, 2000);
});

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
