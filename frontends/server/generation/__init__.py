"""The path of a generation request that all APIs share: streaming driver, parsers, tools and conversations."""
