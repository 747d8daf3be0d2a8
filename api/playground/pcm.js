// PCM16 as the protocol carries it: base64 of little-endian 16-bit samples, mono, 24 kHz.

export const RATE = 24000;

/** Int16Array → base64. */
export function encodePcm(samples) {
  const bytes = new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength);
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) {
    text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  }
  return btoa(text);
}

/** base64 → Float32Array in [-1, 1). */
export function decodePcm(text) {
  const bytes = atob(text);
  const samples = new Float32Array(bytes.length >> 1);
  for (let i = 0; i < samples.length; i++) {
    const value = bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8);
    samples[i] = (value >= 0x8000 ? value - 0x10000 : value) / 32768;
  }
  return samples;
}
