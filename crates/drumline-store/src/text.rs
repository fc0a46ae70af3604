//! Text from others (keys, values, names) in errors and in the log.

/// `text` in one line. Control characters, and characters that move or hide others, are written as escapes.
/// So the author of the text cannot fake a line of the log, and cannot control the terminal.
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

/// Whether `character` separates lines or changes the direction of the text behind it.
fn is_invisible(character: char) -> bool {
    matches!(
        character,
        '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
    )
}
