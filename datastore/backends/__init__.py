"""Where data is kept, as the controller sees it: made, looked at, measured and given up."""
