// Making elements: what the panels that follow the server share.

export function element(tag, className = "", text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
