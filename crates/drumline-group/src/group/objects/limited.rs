//! Reads a compact description of another rank, with limits on the number of values and on their depth.
//!
//! In this format a value may take no bytes, so a list can claim 2⁶⁴ of them. And a type that contains itself
//! can nest one level deeper with every byte or two. So every value counts, and every level.

use std::{cell::Cell, fmt};

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess,
    Visitor,
};

/// The depth to which values may be nested. Deeper values travel in the other format, whose library has a
/// limit of its own.
const DEPTH_MAX: usize = 128;

/// The number of values for which each byte may stand.
const VALUES_PER_BYTE: usize = 64;

/// Reads a `T` from the front of `bytes`. Also returns the bytes behind it.
pub(super) fn from_bytes<'de, T: Deserialize<'de>>(
    bytes: &'de [u8],
) -> postcard::Result<(T, &'de [u8])> {
    let left = Cell::new(VALUES_PER_BYTE.saturating_mul(bytes.len() + 1));
    let mut deserializer = postcard::Deserializer::from_bytes(bytes);
    let limit = Limit { left: &left, depth: 0 };
    let value = T::deserialize(Limited { inner: &mut deserializer, limit })?;
    Ok((value, deserializer.finalize()?))
}

/// The limits for what is inside a value.
#[derive(Clone, Copy)]
struct Limit<'c> {
    /// The number of values that may still come, in total.
    left: &'c Cell<usize>,
    depth: usize,
}

impl Limit<'_> {
    /// The limits one level deeper, for the parts of a value.
    fn inside<E: serde::de::Error>(self) -> Result<Self, E> {
        let left = self.left.get().checked_sub(1);
        self.left.set(left.ok_or_else(|| E::custom("they have more values than bytes allow"))?);
        match self.depth < DEPTH_MAX {
            true => Ok(Limit { depth: self.depth + 1, ..self }),
            false => Err(E::custom(format!("they are nested more than {DEPTH_MAX} times"))),
        }
    }
}

/// A part of serde (a deserializer, a visitor, an access or a seed) that counts values and levels.
struct Limited<'c, I> {
    inner: I,
    limit: Limit<'c>,
}

macro_rules! forward {
    ($($name:ident($($argument:ident: $kind:ty),*))*) => {$(
        fn $name<V: Visitor<'de>>(
            self,
            $($argument: $kind,)*
            visitor: V,
        ) -> Result<V::Value, D::Error> {
            let limit = self.limit.inside()?;
            self.inner.$name($($argument,)* Limited { inner: visitor, limit })
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Limited<'_, D> {
    type Error = D::Error;

    forward! {
        deserialize_any() deserialize_bool() deserialize_i8() deserialize_i16() deserialize_i32()
        deserialize_i64() deserialize_i128() deserialize_u8() deserialize_u16() deserialize_u32()
        deserialize_u64() deserialize_u128() deserialize_f32() deserialize_f64() deserialize_char()
        deserialize_str() deserialize_string() deserialize_bytes() deserialize_byte_buf()
        deserialize_option() deserialize_unit() deserialize_seq() deserialize_map()
        deserialize_identifier() deserialize_ignored_any()
        deserialize_unit_struct(name: &'static str)
        deserialize_newtype_struct(name: &'static str)
        deserialize_tuple(len: usize)
        deserialize_tuple_struct(name: &'static str, len: usize)
        deserialize_struct(name: &'static str, fields: &'static [&'static str])
        deserialize_enum(name: &'static str, variants: &'static [&'static str])
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

macro_rules! visit {
    ($($name:ident: $kind:ty),*) => {$(
        fn $name<E: serde::de::Error>(self, value: $kind) -> Result<V::Value, E> {
            self.inner.$name(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Limited<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    visit! {
        visit_bool: bool, visit_i8: i8, visit_i16: i16, visit_i32: i32, visit_i64: i64,
        visit_i128: i128, visit_u8: u8, visit_u16: u16, visit_u32: u32, visit_u64: u64,
        visit_u128: u128, visit_f32: f32, visit_f64: f64, visit_char: char, visit_str: &str,
        visit_borrowed_str: &'de str, visit_string: String, visit_bytes: &[u8],
        visit_borrowed_bytes: &'de [u8], visit_byte_buf: Vec<u8>
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(Limited { inner, limit: self.limit })
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(Limited { inner, limit: self.limit })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(Limited { inner, limit: self.limit })
    }

    fn visit_map<A: MapAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Limited { inner, limit: self.limit })
    }

    fn visit_enum<A: EnumAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        self.inner.visit_enum(Limited { inner, limit: self.limit })
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Limited<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, inner: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(Limited { inner, limit: self.limit })
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Limited<'_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        inner: S,
    ) -> Result<Option<S::Value>, A::Error> {
        self.inner.next_element_seed(Limited { inner, limit: self.limit })
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Limited<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        inner: S,
    ) -> Result<Option<S::Value>, A::Error> {
        self.inner.next_key_seed(Limited { inner, limit: self.limit })
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, inner: S) -> Result<S::Value, A::Error> {
        self.inner.next_value_seed(Limited { inner, limit: self.limit })
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, 'c, A: EnumAccess<'de>> EnumAccess<'de> for Limited<'c, A> {
    type Error = A::Error;
    type Variant = Limited<'c, A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(
        self,
        inner: S,
    ) -> Result<(S::Value, Self::Variant), A::Error> {
        let limit = self.limit;
        let (value, inner) = self.inner.variant_seed(Limited { inner, limit })?;
        Ok((value, Limited { inner, limit }))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Limited<'_, A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, inner: S) -> Result<S::Value, A::Error> {
        self.inner.newtype_variant_seed(Limited { inner, limit: self.limit })
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, inner: V) -> Result<V::Value, A::Error> {
        self.inner.tuple_variant(len, Limited { inner, limit: self.limit })
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        inner: V,
    ) -> Result<V::Value, A::Error> {
        self.inner.struct_variant(fields, Limited { inner, limit: self.limit })
    }
}

#[cfg(test)]
mod tests {
    use serde::Serialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, serde::Deserialize)]
    struct Tree(Vec<Tree>);

    fn nested(levels: usize) -> Tree {
        (0..levels).fold(Tree(vec![]), |tree, _| Tree(vec![tree]))
    }

    #[test]
    fn values_without_bytes_come_to_an_end() {
        let read = |count: u64| {
            let bytes = postcard::to_allocvec(&count).unwrap();
            from_bytes::<Vec<()>>(&bytes).map(|(list, rest)| (list.len(), rest.len()))
        };
        assert_eq!(read(100), Ok((100, 0)));
        assert!(read(u64::MAX).is_err());
    }

    #[test]
    fn values_that_hold_themselves_come_to_an_end() {
        let tree = nested(20);
        let bytes = postcard::to_allocvec(&tree).unwrap();
        assert_eq!(from_bytes(&bytes), Ok((tree, &[][..])));
        assert!(from_bytes::<Tree>(&[1; 1 << 20]).is_err());
    }
}
