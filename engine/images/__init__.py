"""What images undergo on the device: settings, positions that key it, crops, colour, mixing, erasing."""
