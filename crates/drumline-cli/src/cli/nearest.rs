//! What somebody probably meant.

/// The known word that is most like `word`, if one is.
pub(super) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let rated = known.map(|known| (strsim::jaro_winkler(word, known), known));
    let best = rated.max_by(|(one, _), (other, _)| one.total_cmp(other));
    best.filter(|(likeness, _)| *likeness > ALIKE).map(|(_, known)| known)
}

/// From this value of Jaro and Winkler's measure on, clap suggests an option.
const ALIKE: f64 = 0.7;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_error_is_like_the_word() {
        let known = || ["join_timeout", "close_timeout", "is_host"].into_iter();
        assert_eq!(nearest("join_timout", known()), Some("join_timeout"));
        assert_eq!(nearest("clos_timeout", known()), Some("close_timeout"));
        assert_eq!(nearest("zzz", known()), None);
        assert_eq!(nearest("x", [].into_iter()), None);
    }
}
