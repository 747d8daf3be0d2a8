// A picture that the user chose, made small enough to send.

const LONGEST = 1024; // pixels of its longer side

/** File → {name, url: a data URL, preview: a blob URL}. Raises an Error with words for the user. */
export async function readPicture(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("This file is no picture that the browser can read: choose a JPEG, PNG or WebP.");
  }
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return { name: file.name || "pasted picture", url: canvas.toDataURL("image/jpeg", 0.85), preview: URL.createObjectURL(file) };
}
