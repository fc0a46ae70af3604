//! What algorithms cost over links: a price for each, and the cheapest for every length.
//!
//! All algorithms add in the same order. So the choice of one changes the time and no result, and a rough
//! price suffices. But all ranks must find the same price: it depends on its arguments only, and is
//! computed in integers. A [`PriceList`] holds what is known of a machine and its network.

mod cheapest;
mod list;
mod prices;

pub use cheapest::{Choices, candidates, choose, price};
pub use list::{Entry, Link, ParseError, PriceList, Rate, entries, unknown};
pub use prices::{ElementKind, Prices};
