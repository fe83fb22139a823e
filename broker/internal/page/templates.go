package page

import (
	"embed"
	"fmt"
	"html/template"
	"net/url"

	"github.com/spillway-dev/spillway/broker/internal/page/view"
)

// assets are all that a browser gets beside the documents, and their templates.
//
//go:embed assets
var assets embed.FS

// templates are those of all views, each with the layout.
var templates = parse("clusters", "flows", "queue", "reservations", "reservation", "history", "message", "sign-in")

func parse(names ...string) map[string]*template.Template {
	functions := template.FuncMap{
		"documents": func() []document { return documents },
		"title":     func(d document) string { return d.title },
		"listed":    func(d document) bool { return d.title != "Reservation" },
		"path":      func(d document) string { return d.path },
		// scaled places what is drawn.
		"scaled":       func(value, by float64) string { return fmt.Sprintf("%.1f", value*by) },
		"pages":        pagesOf,
		"daysToChoose": func() []int { return daysToChoose },
		"after": func(path string, days int, from string) string {
			return path + "?" + url.Values{"days": {fmt.Sprint(days)}, "from": {from}}.Encode()
		},
	}
	layout := template.Must(template.New("").Funcs(functions).ParseFS(assets, "assets/layout.html", "assets/parts.html"))
	all := map[string]*template.Template{}
	for _, name := range names {
		all[name] = template.Must(template.Must(layout.Clone()).ParseFS(assets, "assets/"+name+".html"))
	}
	return all
}

// pages are the links to the pages beside one.
type pages struct {
	view.Paging
	Back, Next string
}

// pagesOf are the links of a view at a path, with a filter.
func pagesOf(paging view.Paging, path, filter string) pages {
	link := func(page int) string {
		if page == 0 {
			return ""
		}
		query := url.Values{"page": {fmt.Sprint(page)}}
		if filter != "" {
			query.Set("filter", filter)
		}
		return path + "?" + query.Encode()
	}
	return pages{paging, link(paging.Before), link(paging.After)}
}
