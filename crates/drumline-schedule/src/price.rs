//! What algorithms cost over links: the price of each, and the cheapest one for every length.
//!
//! All algorithms add in the same order. So the choice of an algorithm changes the time of a call and not its
//! result, and rough prices suffice. But all ranks must compute the same price. So a price depends on its
//! arguments only, and is computed in integers. A [`PriceList`] holds the known figures of a machine and its
//! network.

mod cheapest;
mod list;
mod prices;

pub use cheapest::{Choices, candidates, choose, price};
pub use list::{Link, ParseError, PriceList};
pub use prices::{ElementKind, Prices};
