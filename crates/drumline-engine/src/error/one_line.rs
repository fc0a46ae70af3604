//! Text of other ranks in errors and in the log.

/// What another rank wrote, in one line. Without line breaks and escape codes it can fake no line of
/// the log, and command no terminal.
pub(crate) fn one_line(text: &[u8]) -> String {
    String::from_utf8_lossy(text).replace(char::is_control, " ")
}
