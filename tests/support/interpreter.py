"""Triton's interpreter runs the kernels where there is no GPU. Here it repeats less of its own work.

Before each launch, and before each call of a device function, it searches `triton.language` for the functions to replace by its
own, and puts the old ones back after the launch. For each operation it builds its table of types anew. Together that takes a third
of the time of a small kernel.
"""

import inspect


def hasten_interpreter() -> None:
    """Search `triton.language` once, and keep what was replaced; look a type up once for each name.

    A process in which Triton interprets compiles no kernel, so it does not need the old functions.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if interpreter._patch_lang.__module__ == __name__:
        return
    replace, find_type = interpreter._patch_lang, interpreter._get_np_dtype
    replaced = []
    types = {}

    def replace_once(function):
        visible = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        new = [each for each in (tl, tl.core) if each in visible and each not in replaced]
        if new:
            replace(function)
            replaced.extend(new)
        # The interpreter restores what is recorded here after the launch: nothing.
        return interpreter._LangPatchScope()

    def find_type_once(dtype):
        found = types.get(dtype.name)
        if found is None:
            found = types[dtype.name] = find_type(dtype)
        return found

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, find_type_once
