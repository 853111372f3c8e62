"""Images of a request: files, URLs, processors and the process that decodes them."""
