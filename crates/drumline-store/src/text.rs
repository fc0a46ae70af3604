//! Text of others (keys, values, names) in errors and in the log.

/// `text` in one line: control characters, and others that move or hide what stands beside them,
/// are written as escapes. So its author can fake no line of the log, and command no
/// terminal.
///
/// ```
/// assert_eq!(drumline_store::text::escaped("a\nb\x1b[2J"), r"a\nb\u{1b}[2J");
/// assert_eq!(drumline_store::text::escaped("Schlüssel/1"), "Schlüssel/1");
/// ```
pub fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() || is_invisible(character) {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Separators of lines, and what changes the direction of the text behind it.
fn is_invisible(character: char) -> bool {
    matches!(
        character,
        '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
    )
}
