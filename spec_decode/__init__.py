"""Draft trees: their state on the device, the reference of the tests, what is measured."""
