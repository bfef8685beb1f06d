"""Training leaves the device to requests: it waits between passes, and takes smaller and fewer of them."""
