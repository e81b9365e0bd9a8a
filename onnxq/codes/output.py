"""Q0xx: the command line and the program. Q6xx: outputs."""

from onnxq.codes.base import Code

PROGRAM = (
    Code("Q000", "an error of an extension",
         "An observer, metric or data function that is not onnxq's raised an OnnxqError without a code.",
         "See the message, and the code that raised it."),
    Code("Q001", "the command line is wrong",
         "An unknown command or option, a value an option does not take, or an argument that is missing. Exit code"
         " 2.",
         "See the help of the command."),
    Code("Q002", "there is not enough memory",
         "Python could not get the memory it asked for.",
         "Lower the batch, bound the memory, or give fewer samples."),
    Code("Q003", "a defect of onnxq",
         "Something went wrong that is not yours to mend. Exit code 70, with a traceback.",
         "Please report it with the traceback, and with the model if you can."),
)  # fmt: skip

OUTPUT = (
    Code("Q600", "the result cannot be written",
         "Something about the place of an output stops the work; the message names it.",
         "Choose another place."),
    Code("Q601", "the output exists already",
         "Nothing is overwritten unless that is asked for.",
         "Choose another name, or allow overwriting."),
    Code("Q602", "the output is the input or another output",
         "The input is never overwritten, and two outputs need two names.",
         "Choose another name."),
    Code("Q603", "the output's folder is not there, or the output is a folder",
         "A file needs an existing folder and a name of its own.",
         "Create the folder first, and name a file in it."),
    Code("Q604", "writing failed",
         "The system did not let the file be written: no space, no permission. Nothing half-written is left.",
         "Free space, check permissions, or choose another folder."),
    Code("Q605", "the cache of compiled kernels is not safe or not writable",
         "Compiled code is loaded from this folder, so nobody else may write to it.",
         "Mend its owner and permissions, or set XDG_CACHE_HOME to a folder of your own."),
)  # fmt: skip
