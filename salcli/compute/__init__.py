"""Where and how to compute: devices, precision, batches of images, several processes."""
