// Runs in a page before its own scripts. check_pictures.py asks it which texts the page shows, and hides them.
// A text: what it says, the corners of its ink, its colour, and its size; lengths in pixels.
"use strict";

globalThis.drawnTexts = (() => {
  const onCanvas = new Map();
  let isHidden = false;

  // A canvas keeps no texts. Remember those that are drawn on it until it is cleared, each as far as it can be seen.
  const pen = CanvasRenderingContext2D.prototype;
  const { fillText, clearRect, rect, clip, save, restore } = pen;
  const states = new WeakMap();
  const stateOf = it => states.get(it) ?? states.set(it, { rect: null, clip: null, saved: [] }).get(it);
  const common = (a, b) => !a ? b : [Math.max(a[0], b[0]), Math.max(a[1], b[1]), Math.min(a[2], b[2]), Math.min(a[3], b[3])];
  pen.rect = function (x, y, w, h) { stateOf(this).rect = [x, y, x + w, y + h]; rect.call(this, x, y, w, h); };
  pen.clip = function () { const state = stateOf(this); state.clip = common(state.clip, state.rect); clip.call(this); };
  pen.save = function () { const state = stateOf(this); state.saved.push(state.clip); save.call(this); };
  pen.restore = function () { const state = stateOf(this); state.clip = state.saved.pop() ?? null; restore.call(this); };
  pen.clearRect = function (...area) { onCanvas.set(this.canvas, []); clearRect.apply(this, area); };
  pen.fillText = function (text, x, y, ...most) {
    const size = this.measureText(text), wide = Math.min(size.width, ...most);
    const ink = [x, y - size.actualBoundingBoxAscent, x + wide, y + size.actualBoundingBoxDescent];
    const [left, top, right, bottom] = common(stateOf(this).clip, ink);
    if (left < right && top < bottom) {
      onCanvas.get(this.canvas)?.push({ text, quad: corners(left, top, right, bottom), colour: this.fillStyle, size: parseFloat(this.font) });
    }
    if (!isHidden) fillText.call(this, text, x, y, ...most);
  };

  const corners = (left, top, right, bottom) => [[left, top], [right, top], [right, bottom], [left, bottom]];

  // The box of a text has room for the highest and the lowest sign of its font. The ink of most texts takes less.
  const inked = (left, top, right, bottom) => corners(left, top + 0.2 * (bottom - top), right, bottom - 0.15 * (bottom - top));

  function ofSvg(element) {
    const { x, y, width, height } = element.getBBox(), toScreen = element.getScreenCTM(), style = getComputedStyle(element);
    const quad = inked(x, y, x + width, y + height).map(([x, y]) => new DOMPoint(x, y).matrixTransform(toScreen)).map(at => [at.x, at.y]);
    return [{ text: element.textContent, quad, colour: style.fill, size: parseFloat(style.fontSize) * Math.hypot(toScreen.a, toScreen.b) }];
  }

  function ofNode(node) {
    const range = document.createRange(), style = getComputedStyle(node.parentElement);
    range.selectNodeContents(node);
    return [...range.getClientRects()].map(({ left, top, right, bottom }) =>
      ({ text: node.textContent, quad: inked(left, top, right, bottom), colour: style.color, size: parseFloat(style.fontSize) }));
  }

  function ofCanvas(canvas, texts) {
    const { left, top } = canvas.getBoundingClientRect();
    return texts.map(text => ({ ...text, quad: text.quad.map(([x, y]) => [x + left, y + top]) }));
  }

  function all() {
    const nodes = [], walker = document.createTreeWalker(document.body ?? document.createElement("p"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) if (walker.currentNode.parentElement.checkVisibility()) nodes.push(walker.currentNode);
    const texts = [
      ...[...document.querySelectorAll("text")].flatMap(ofSvg),
      ...nodes.filter(node => !node.parentElement.closest("svg")).flatMap(ofNode),
      ...[...onCanvas].flatMap(([canvas, texts]) => ofCanvas(canvas, texts)),
    ];
    return texts.map(it => ({ ...it, text: it.text.trim() })).filter(it => it.text);
  }

  function hide() {
    isHidden = true;
    const style = document.createElementNS("http://www.w3.org/1999/xhtml", "style");
    style.textContent = "text { visibility: hidden !important } * { color: transparent !important }";
    document.documentElement.append(style);
    dispatchEvent(new KeyboardEvent("keydown", { key: "Home" })); // The page of a trace draws itself anew.
  }

  return { all, hide };
})();
